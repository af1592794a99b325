"""The engine interface: what the training loop calls, whichever strategy runs the step.

It is the whole step, not forward and backward: a pipeline needs all micro-batches at once, engines
clip differently, and the loss can be normalised by the step's label tokens only where all its
micro-batches are known (gradient accumulation).
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
        """Begins to copy the micro-batches of a coming step to the device; other threads may call
        it. `step` takes them as they are or as this returns them."""
        ...

    def preflight(self, microbatches: Sequence[MicroBatch]) -> None:
        """Allocates the memory that a step of these micro-batches would take, and frees it. Changes
        nothing."""
        ...

    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        """Loss and token accuracy over all ranks' micro-batches. Changes nothing."""
        ...

    def offending_samples(
        self, step: int, microbatches: Sequence[MicroBatch], result: StepResult
    ) -> tuple[str, ...]:
        """This rank's samples that are to blame for a skipped step, as far as they can be found.
        Steps count from 1. A collective: every rank has to call it."""
        ...

    def nonfinite_weights(self) -> tuple[str, ...]:
        """The trained weights that aren't finite on this rank."""
        ...

    def module(self) -> nn.Module:
        """The model itself, for generation and for saving the result."""
        ...

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained weight by its name in the model, unsharded, one after another. A
        collective: all ranks have to iterate over all of them. Copy a weight to keep it."""
        ...

    def held(self) -> Held:
        """The bytes that this rank holds between two steps, by state and place."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The state of training: unsharded tensors by `kind.weight`, and a few numbers."""
        ...

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        """The same, but only the shards that this rank saves. Together the ranks' shards are every
        tensor once."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Restores a `state`, also of another engine. Tensors may be read lazily; an engine asks
        for one at a time."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
