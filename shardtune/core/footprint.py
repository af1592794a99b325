"""Bytes: what a layout predicts for a rank, and what an engine really holds. One type for both."""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.core.layout import Home, Layout, State
from shardtune.core.mesh import Mesh

MODEL_STATES: tuple[State, ...] = ("params", "grads", "optim")


@dataclass(frozen=True)
class ModelBytes:
    """What a model and its training take, undivided.

    Frozen weights have no gradient and no optimizer state; they are counted apart because some
    strategies divide them and some don't.
    """

    params: int
    """All weights, as they are stored between steps."""
    grads: int
    optim: int


@dataclass(frozen=True)
class Held:
    """Bytes by state and by the place where they lie."""

    bytes: dict[tuple[State, Home], int]

    def of(self, state: State) -> int:
        """A state's bytes, wherever they lie."""
        return sum(size for (kind, _), size in self.bytes.items() if kind == state)


def predict_held(layout: Layout, mesh: Mesh, whole: ModelBytes) -> Held:
    """The share of each state that a rank holds between two steps, padding not counted."""
    return Held(
        {
            (state, layout.home.get(state, "gpu")): getattr(whole, state)
            // layout.divisor(state, mesh)
            for state in MODEL_STATES
        }
    )
