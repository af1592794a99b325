"""The part of a model that a rank works on, once stages and slices are cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardtune.core.footprint import ModelBytes
from shardtune.core.layout import Cargo
from shardtune.core.mesh import Mesh
from shardtune.core.shape import LAYERS, ModelShape

WEIGHTS: frozenset[Cargo] = frozenset({"params", "recalled"})
"""What gathers carry: all weights, or those that the backward pass needs again."""


@dataclass(frozen=True)
class Cut:
    """How many ways the model itself is cut, apart from data parallelism."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @staticmethod
    def of(mesh: Mesh) -> Cut:
        return Cut(mesh.size_of("tensor"), mesh.size_of("pipeline"), mesh.size_of("context"))


@lru_cache(maxsize=4096)
def held_share(shape: ModelShape, cut: Cut) -> float:
    """The largest share of all weights that a stage's slice holds.

    Layers are spread evenly; the first stage has the embedding, the last the head. Tensor
    parallelism leaves norms whole, which is next to nothing.
    """
    if cut.pipeline == 1:
        return 1 / cut.tensor
    ends = max(shape.parameters_in("embedding"), shape.parameters_in("head"))
    layers = sum(shape.parameters_in(part) for part in LAYERS)
    return (layers / cut.pipeline + ends) / shape.parameters / cut.tensor


def scaled(whole: ModelBytes, share: float) -> ModelBytes:
    """A share of all states alike."""
    return ModelBytes(
        round(whole.params * share),
        round(whole.trained * share),
        round(whole.grads * share),
        round(whole.optim * share),
    )
