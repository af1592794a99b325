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

    `position_ids` restart at 0 with every document: that alone keeps packed documents apart (a
    model given restarting positions and no attention mask builds a block-diagonal one, unless its
    attention is told of boundaries instead).
    `targets[r, t]` is the token that position `t` has to predict, or IGNORED; they are shifted
    here once, so that no document ever predicts the first token of the next.

    A model with an encoder has `source_mask`: it reads its sources from `input_ids`, and `targets`
    are rows of their own, as wide as the longest target, where position `t` of the decoder has to
    predict `targets[r, t]`.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    samples: tuple[str, ...]
    """The ids of the documents in it, in order."""
    tokens: int
    """Tokens of real documents, padding not counted."""
    labels: int
    """Positions that are trained."""
    attention: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the model's attention is told besides (`documents.attention_inputs`)."""
    lengths: Tensor | None = field(default=None, compare=False)
    """Tokens of each row, padding not counted; None where rows have no padding."""
    source_mask: Tensor | None = None
    """Where an encoder reads `input_ids`: 1 for tokens, 0 for padding."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step as the whole group of ranks saw it."""

    loss: float
    """Mean loss of the step's label tokens over all ranks and micro-batches."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    learning_rate: float
    tokens: int
    labels: int
    applied: bool = True
    """False when the gradient wasn't finite and the update was left out on every rank."""
    busy: float | None = field(default=None, compare=False)
    """Seconds in which this rank computed; None where an engine can't tell. A clock's reading, so
    equal steps may differ in it."""
    since_last: float | None = field(default=None, compare=False, repr=False)
    """Seconds between the end of the step before and the end of this one, by a GPU's clock; None
    for an engine's first step, and on a processor."""
    on_device: DeviceParts | None = field(default=None, compare=False, repr=False)
    """Where a GPU's time went, by its own clock; None on a processor."""
    losses: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """This rank's micro-batches, each with its loss as it was summed: one that is no number tells
    which of them is to blame."""

    def read(self) -> StepResult:
        """The same, with every figure at hand."""
        return self

    def is_done(self) -> bool:
        """Whether nobody would have to wait for it."""
        return True


_FIGURES = frozenset(each.name for each in fields(StepResult))


class LateResult(StepResult):
    """The result of a step that a device is still computing. Whoever first asks for a figure waits
    for it: for the end of this step, not for those that have been enqueued after it."""

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
    """The share of the time in which a rank computed, on average over all; None if unknown."""


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
        """Share of the trained tokens that the model would have chosen itself."""
        return self.correct / self.labels

    def summary(self) -> EvalFigures:
        """The figures that reports show."""
        return EvalFigures(
            loss=self.loss,
            perplexity=self.perplexity,
            accuracy=self.accuracy,
            labels=self.labels,
        )
