"""The seam between the training loop and every way to run it.

The seam is the whole step, not forward and backward: a pipeline needs all micro-batches at once,
engines clip differently, and only who sees all micro-batches of a step can normalise its loss by
the step's label tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from shardtune.core.footprint import Held
from shardtune.core.step import EvalResult, MicroBatch, StepResult
from shardtune.core.tensor_shards import TensorShard

if TYPE_CHECKING:
    from torch import Tensor, nn


class Engine(Protocol):
    """One rank's part in training a model."""

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        """Forward, backward, clip, update, schedule: one optimizer step over all ranks.

        It may return before a device has computed it: reading the result waits."""
        ...

    def stage(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Begins to bring the micro-batches of a coming step to the device, which other threads may
        do too; `step` takes them as they are or as this returns them."""
        ...

    def preflight(self, microbatches: Sequence[MicroBatch]) -> None:
        """Takes the memory that a step of these micro-batches would take, and gives it back.
        Changes nothing."""
        ...

    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        """Loss and token accuracy over all ranks' micro-batches. Changes nothing."""
        ...

    def offending_samples(
        self, step: int, microbatches: Sequence[MicroBatch], result: StepResult
    ) -> tuple[str, ...]:
        """This rank's samples that are to blame for a step that wasn't applied, as far as that can
        be told. Steps count from 1. Every rank has to ask."""
        ...

    def nonfinite_weights(self) -> tuple[str, ...]:
        """The trained weights that hold something on this rank that is no number."""
        ...

    def module(self) -> nn.Module:
        """The model itself, for generation and for saving the result."""
        ...

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight that is trained, by its name in the model: whole, but one after another.
        All ranks have to go through all of them; who needs a weight later keeps a copy."""
        ...

    def held(self) -> Held:
        """The bytes that this rank holds between two steps, by state and place."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """What training needs to go on: whole tensors by `kind.weight`, and a few numbers."""
        ...

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        """The same, but of the tensors only what this rank is to save. Together the ranks' shards
        are every tensor once."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """The inverse of `state`, also of another engine's. Tensors may be read as they are asked
        for; an engine asks for one at a time."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
