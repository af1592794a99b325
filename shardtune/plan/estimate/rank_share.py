"""The part of a model that a rank works on, once stages and slices are cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from shardtune.core.footprint import ModelBytes
from shardtune.core.layout import Cargo
from shardtune.core.mesh import Mesh
from shardtune.core.model.shape import LAYER_PARTS, ModelShape
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.plan.estimate.workload import Workload

WEIGHTS: frozenset[Cargo] = frozenset({"params", "recalled"})
"""What gathers carry: all weights, or those that the backward pass needs again."""


@dataclass(frozen=True)
class RankShare:
    """How many ways the model itself is cut, apart from data parallelism; and one rank's place."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    place: int = 0
    """Of the rank, along the pipeline."""
    starts: bool = True
    """Whether it has the embedding."""
    ends: bool = True
    """Whether it has the head."""
    expert: int = 1
    """Over how many ranks the experts of a layer are divided."""

    @staticmethod
    def of(mesh: Mesh, order: Pipelining, place: int = 0) -> RankShare:
        owners = order.ranks(mesh.size_of("pipeline"))
        return RankShare(
            mesh.size_of("tensor"),
            mesh.size_of("pipeline"),
            mesh.size_of("context"),
            place,
            owners[0] == place,
            owners[-1] == place,
            mesh.size_of("expert"),
        )

    @staticmethod
    def extremes(mesh: Mesh, order: Pipelining) -> tuple[RankShare, ...]:
        """The places that can hold most: the first has most micro-batches under way, the last the
        logits."""
        return tuple(
            RankShare.of(mesh, order, p) for p in sorted({0, mesh.size_of("pipeline") - 1})
        )


@lru_cache(maxsize=4096)
def held_share(shape: ModelShape, cut: RankShare) -> float:
    """The share of all weights that a stage's slice holds.

    Layers are spread evenly. Tensor parallelism leaves norms whole, which is next to nothing.
    Experts are divided, all else is whole; what is trained is taken to lie as all weights do.
    """
    if cut.expert > 1:
        return 1 - _routed_share(shape) * (1 - 1 / cut.expert)
    if cut.pipeline == 1:
        return 1 / cut.tensor
    layers = sum(shape.parameters_in(part) for part in LAYER_PARTS)
    return (layers / cut.pipeline + end_parameters(shape, cut)) / shape.parameters / cut.tensor


def _routed_share(shape: ModelShape) -> float:
    """The experts' share of all parameters."""
    return shape.count(lambda weight: weight.routed and weight.parameter) / shape.parameters


def end_parameters(shape: ModelShape, cut: RankShare) -> int:
    """Weights of the embedding and the head, where the rank has them; shared ones once."""
    table, head = shape.parameters_in("embedding"), shape.parameters_in("head")
    if shape.tied:
        return table if cut.starts or cut.ends else 0
    return table * cut.starts + head * cut.ends


def scaled(whole: ModelBytes, share: float) -> ModelBytes:
    """A share of all states alike."""
    return ModelBytes(
        round(whole.params * share),
        round(whole.trained * share),
        round(whole.grads * share),
        round(whole.optim * share),
    )


def part_bytes(whole: ModelBytes, shape: ModelShape, work: Workload, cut: RankShare) -> ModelBytes:
    """A rank's part of all states, and what flows through it for one micro-batch."""
    tokens = work.tokens / cut.context
    flowing = round(tokens * shape.hidden * (4 if work.wide_stream else work.widths.compute))
    learns = work.adapter is None  # whether the embedding wants a gradient
    layers = -(-(shape.layers + shape.encoder_layers) // cut.pipeline)
    shared = shape.tied and learns and cut.pipeline > 1 and cut.starts != cut.ends
    return replace(
        scaled(whole, held_share(shape, cut)),
        unsliced=round(_unsliced(shape, work) / cut.pipeline * work.widths.reduced),
        unrouted=round(whole.grads * (1 - _routed_share(shape))) if cut.expert > 1 else 0,
        routed=flowing * shape.experts.per_token if shape.experts else 0,
        mixtures=shape.experts.layers if shape.experts else 0,
        tied=round(end_parameters(shape, cut) * work.widths.reduced) if shared else 0,
        hidden=flowing,
        embedded=flowing if learns else 0,
        scores=4 * tokens * work.scored,
        layers=layers,
        returns=layers if learns or not cut.starts else layers - 1,
        starts=int(cut.starts),
        ends=int(cut.ends),
        borders=work.pipelining.borders(cut.pipeline, cut.place),
    )


def _unsliced(shape: ModelShape, work: Workload) -> float:
    """Trained numbers that slices keep whole: norms, or one of each adapter's two factors."""
    if work.adapter is not None:
        return work.trained(shape) / 2
    return sum(weight.total for weight in shape.weights if weight.kind == "norm")
