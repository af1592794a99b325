"""What goes into an optimizer step and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.runs.step_parts import DeviceParts

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # the target of a position that isn't trained


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass, ready for the model.

    `position_ids` restart at 0 with every document: that alone isolates packed documents (a model
    given restarting positions and no attention mask builds a block-diagonal one, unless its
    attention gets cu_seqlens instead).
    `targets[r, t]` is the label of position `t`, or IGNORED; labels are shifted here once, so that
    no document ever predicts the first token of the next.

    A model with an encoder has `source_mask`: it reads its sources from `input_ids`, and `targets`
    are rows of their own, as wide as the longest target, with the labels of the decoder.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    samples: tuple[str, ...]
    """The ids of the documents in it, in order."""
    tokens: int
    """Tokens of real documents, padding not counted."""
    labels: int
    """Label tokens: positions that count in the loss."""
    attention: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Further arguments of the model's attention (`document_boundaries.py`)."""
    lengths: Tensor | None = field(default=None, compare=False)
    """Tokens of each row, padding not counted; None where rows have no padding."""
    source_mask: Tensor | None = None
    """Where an encoder reads `input_ids`: 1 for tokens, 0 for padding."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step over all ranks."""

    loss: float
    """Mean loss of the step's label tokens over all ranks and micro-batches."""
    grad_norm: float
    """Norm of the unsharded gradient before clipping."""
    learning_rate: float
    tokens: int
    labels: int
    applied: bool = True
    """False if the gradient wasn't finite and the update was skipped on every rank."""
    busy: float | None = field(default=None, compare=False)
    """Seconds in which this rank didn't wait for others; None if the engine doesn't know. A time,
    so equal steps may differ in it."""
    since_last: float | None = field(default=None, compare=False, repr=False)
    """Seconds between the end of the step before and the end of this one, by the GPU's clock; None
    for an engine's first step, and on a CPU."""
    on_device: DeviceParts | None = field(default=None, compare=False, repr=False)
    """Where the GPU's time went, by its own clock; None on a CPU."""
    losses: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """The summed loss of each micro-batch of this rank: a non-finite one shows which is to
    blame."""

    def read(self) -> StepResult:
        """The same, with every figure read from the device."""
        return self

    def is_done(self) -> bool:
        """Whether it can be read without waiting."""
        return True


_FIGURES = frozenset(each.name for each in fields(StepResult))


class LateResult(StepResult):
    """The result of a step that the GPU is still computing. The first read of a figure waits for
    the end of this step, not for steps that were enqueued after it."""

    def __init__(
        self, wait: Callable[[], StepResult], done: Callable[[], bool] = lambda: True
    ) -> None:
        object.__setattr__(self, "_wait", cache(wait))
        object.__setattr__(self, "_done", done)

    def read(self) -> StepResult:
        found: StepResult = object.__getattribute__(self, "_wait")()
        return found

    def is_done(self) -> bool:
        return bool(object.__getattribute__(self, "_done")())

    def __getattribute__(self, name: str) -> Any:
        return getattr(self.read(), name) if name in _FIGURES else super().__getattribute__(name)


@dataclass(frozen=True)
class Reading:
    """One step, measured: speed is over all ranks, memory is this rank's peak so far."""

    seconds: float
    tokens_per_second: float
    seconds_left: float
    memory_gib: float
    utilisation: float | None = None
    """Share of the time in which a rank didn't wait for others, the mean over all; None if
    unknown."""


@dataclass(frozen=True)
class EvalResult:
    """Loss and accuracy of one evaluation set."""

    name: str
    loss_sum: float
    correct: int
    labels: int

    @property
    def loss(self) -> float:
        return self.loss_sum / self.labels

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def accuracy(self) -> float:
        """Token accuracy: share of the label tokens to which the model gives the highest
        probability."""
        return self.correct / self.labels

    def summary(self) -> EvalFigures:
        """The figures that reports show."""
        return EvalFigures(
            loss=self.loss,
            perplexity=self.perplexity,
            accuracy=self.accuracy,
            labels=self.labels,
        )
