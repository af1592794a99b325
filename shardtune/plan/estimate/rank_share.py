"""The part of a model that a rank works on, once stages, slices and experts are divided."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from shardtune.core.footprint import ExpertBytes, ModelBytes
from shardtune.core.layout import Cargo, Layout, State
from shardtune.core.mesh import Mesh
from shardtune.core.model.shape import LAYER_PARTS, MATMUL_KINDS, ModelShape
from shardtune.core.pipeline_schedule import Pipelining, split_layers, stage_costs
from shardtune.plan.estimate.expert_load import imbalance
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
    stage_layers: int | None = None
    """Layers that the rank has; None where all have equally many."""

    @staticmethod
    def of(shape: ModelShape, mesh: Mesh, work: Workload, place: int = 0) -> RankShare:
        ranks = mesh.size_of("pipeline")
        owners = work.pipelining.ranks(ranks)
        return RankShare(
            mesh.size_of("tensor"),
            ranks,
            mesh.size_of("context"),
            place,
            owners[0] == place,
            owners[-1] == place,
            mesh.size_of("expert"),
            _layers_by_place(shape, mesh, work)[place],
        )

    @staticmethod
    def extremes(shape: ModelShape, mesh: Mesh, work: Workload) -> tuple[RankShare, ...]:
        """The places that can hold most or take longest: the first has most micro-batches under
        way, one has most layers, the last the head and the logits."""
        layers = [count or 0 for count in _layers_by_place(shape, mesh, work)]
        places = sorted({0, layers.index(max(layers)), len(layers) - 1})
        return tuple(RankShare.of(shape, mesh, work, place) for place in places)

    def layers(self, shape: ModelShape) -> float:
        """Layers of the rank."""
        if self.stage_layers is not None:
            return self.stage_layers
        return (shape.layers + shape.encoder_layers) / self.pipeline

    def layer_share(self, shape: ModelShape) -> float:
        """Of all layers."""
        return self.layers(shape) / (shape.layers + shape.encoder_layers)


def _layers_by_place(shape: ModelShape, mesh: Mesh, work: Workload) -> tuple[int | None, ...]:
    """Of each rank along the pipeline. Other tools give all of them equally many."""
    ranks = mesh.size_of("pipeline")
    if ranks == 1 or not work.counted:
        return (None,) * ranks
    return stage_layers(shape, work.pipelining, ranks)


@lru_cache(maxsize=4096)
def stage_layers(shape: ModelShape, order: Pipelining, ranks: int) -> tuple[int, ...]:
    """How many layers each rank of our own pipelines has: `parallel/pipeline/stage.py` cuts by the
    multiplications of a token."""
    costs: list[float] = []
    for part in LAYER_PARTS:
        if layers := shape.layers_in(part):
            weights = [each for each in shape.in_part(part) if each.linear or each.routed]
            matrices = [each for each in weights if each.kind in MATMUL_KINDS]
            cost = sum(map(shape.active, matrices)) / layers
            costs += [cost] * layers
    stages = split_layers(stage_costs(costs, shape.vocab * shape.hidden), order.stages(ranks))
    found = [0] * ranks
    for owner, stage in zip(order.ranks(ranks), stages, strict=True):
        found[owner] += len(stage)
    return tuple(found)


@lru_cache(maxsize=4096)
def held_share(shape: ModelShape, cut: RankShare) -> float:
    """The share of all weights that a stage's slice holds.

    Layers count alike. Tensor parallelism leaves norms whole, which is next to nothing.
    """
    if cut.pipeline == 1:
        return 1 / cut.tensor
    layers: float = sum(shape.parameters_in(part) for part in LAYER_PARTS)
    held = layers * cut.layer_share(shape) + end_parameters(shape, cut)
    if cut.ends:
        held += shape.parameters_in("root")  # the last norm
    return held / shape.parameters / cut.tensor


def largest_part(shape: ModelShape, cut: RankShare) -> float:
    """Weights of the largest layer that a rank works on: of its experts, its own."""
    elsewhere = largest_experts(shape) * (1 - 1 / cut.expert)
    return (shape.largest_layer - elsewhere) / cut.tensor


def largest_experts(shape: ModelShape) -> int:
    """Weights of all experts of a layer, where it has most."""
    return max(
        sum(weight.size for weight in shape.in_part(part) if weight.routed) for part in LAYER_PARTS
    )


def end_parameters(shape: ModelShape, cut: RankShare) -> int:
    """Weights of the embedding and the head, where the rank has them; shared ones once."""
    table, head = shape.parameters_in("embedding"), shape.parameters_in("head")
    if shape.tied:
        return table if cut.starts or cut.ends else 0
    return table * cut.starts + head * cut.ends


def states_of(whole: ModelBytes, shape: ModelShape, cut: RankShare) -> ModelBytes:
    """A rank's part of all states: of experts its own, of all else what its stage and slice have,
    for which weights of every kind are taken to lie as all of them do."""
    share = held_share(shape, cut)
    # Asked thousands of times by `plan`: `asdict` would copy each number.
    whole_experts: dict[str, int] = vars(whole.experts)
    experts = {state: size * share / cut.expert for state, size in whole_experts.items()}

    def part(state: str) -> int:
        elsewhere = whole_experts[state] * share - experts[state]
        size: int = getattr(whole, state)
        return round(size * share - elsewhere)

    return ModelBytes(
        params=part("params"),
        trained=part("trained"),
        grads=part("grads"),
        optim=part("optim"),
        experts=ExpertBytes(**{state: round(size) for state, size in experts.items()}),
    )


def spread_evenly(
    layout: Layout, mesh: Mesh, state: State, part: float, of_experts: float
) -> float:
    """What even shares leave to a rank of its part, of which so much is experts'."""
    rest = (part - of_experts) / layout.divisor(state, mesh)
    return rest + of_experts / layout.divisor(state, mesh, "experts")


def part_bytes(whole: ModelBytes, shape: ModelShape, work: Workload, cut: RankShare) -> ModelBytes:
    """A rank's part of all states, and what flows through it for one micro-batch."""
    tokens = work.tokens / cut.context
    flowing = round(tokens * shape.hidden * (4 if work.wide_stream else work.widths.compute))
    learns = work.adapter is None  # whether the embedding wants a gradient
    layers = math.ceil(cut.layers(shape))
    shared = shape.tied and learns and cut.pipeline > 1 and cut.starts != cut.ends
    return replace(
        states_of(whole, shape, cut),
        unsliced=round(_unsliced(shape, work) * cut.layer_share(shape) * work.widths.reduced),
        routed=round(flowing * shape.experts.per_token * imbalance(shape, cut.expert))
        if shape.experts
        else 0,
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
