"""The lines of `metrics.jsonl`: one per step, per evaluation and per task, and one for what is
amiss."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from shardtune.core.record import Record
from shardtune.core.runs.run_report import TaskFigures
from shardtune.core.step import Reading, StepResult
from shardtune.core.runs.step_parts import StepParts


class StepMetrics(Record):
    """One optimizer step, over all ranks. Null where a number isn't finite or isn't known."""

    kind: Literal["step"]
    step: int
    """From 1."""
    loss: float | None
    """Mean loss of the step's trained tokens."""
    grad_norm: float | None
    """Norm of the whole gradient before clipping."""
    learning_rate: float
    tokens: int
    labels: int
    """Trained tokens."""
    applied: bool
    """False when the gradient wasn't finite and the update was left out on every rank."""
    busy: float | None
    """Seconds in which a rank computed, on average."""
    seconds: float
    tokens_per_second: float
    """Over the last steps."""
    seconds_left: float
    memory_gib: float
    """The peak of rank 0 so far."""
    utilisation: float | None
    """The share of the time in which a rank computed, over the last steps."""
    epoch: float
    samples_sha256: str
    """A digest of the ids of the documents in it."""
    parts: StepParts | None = None
    """Where the time of the last steps went, by rank; left out of most lines: one a second at most
    has it."""

    @staticmethod
    def of(
        step: int,
        result: StepResult,
        reading: Reading,
        *,
        epoch: float,
        samples_sha256: str,
        parts: StepParts | None = None,
    ) -> StepMetrics:
        found = StepMetrics(
            kind="step",
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tokens=result.tokens,
            labels=result.labels,
            applied=result.applied,
            busy=result.busy,
            seconds=reading.seconds,
            tokens_per_second=reading.tokens_per_second,
            seconds_left=reading.seconds_left,
            memory_gib=reading.memory_gib,
            utilisation=reading.utilisation,
            epoch=epoch,
            samples_sha256=samples_sha256,
        )
        return found if parts is None else found.model_copy(update={"parts": parts})


class EvaluationMetrics(Record):
    """One held-out set after so many steps."""

    kind: Literal["evaluation"]
    step: int
    """0 is the model as it was."""
    set: str
    loss: float | None
    perplexity: float | None
    accuracy: float | None
    labels: int


class TaskMetrics(TaskFigures):
    """One task (`evaluate.tasks`) after so many steps."""

    kind: Literal["task"]
    step: int
    """0 is the model as it was."""
    task: str


class LossSpike(Record):
    """A loss far above that of the steps before it."""

    kind: Literal["spike"]
    step: int
    fact: str
    usual: float
    """The loss of the steps before."""
    samples: tuple[str, ...]
    """The ids of the documents in the step."""


class NonfiniteGradient(Record):
    """A step whose update was left out."""

    kind: Literal["not_finite"]
    step: int
    fact: str
    ranks: dict[int, tuple[str, ...]]
    """The documents to blame, by the rank that had them."""
    weights: dict[int, tuple[str, ...]]
    """The names of weights that are no longer numbers, by rank."""


WarningKind: TypeAlias = Literal[
    "overfitting",
    "divergence",
    "learning_rate_too_high",
    "learning_rate_too_low",
    "dead_adapter",
    "set_gets_worse",
]


class CurveWarning(Record):
    """What the curves say is wrong with a run. Each is said once, and stops nothing."""

    kind: Literal["warning"]
    step: int
    about: WarningKind
    fact: str
    """With the numbers, and what to try."""
    set: str | None = None
    """The held-out set that tells."""
    since: int | None = None
    """The step from which on it is so."""


MetricsLine: TypeAlias = Annotated[
    StepMetrics | EvaluationMetrics | TaskMetrics | LossSpike | NonfiniteGradient | CurveWarning,
    Field(discriminator="kind"),
]
