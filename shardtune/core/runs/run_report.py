"""The report of a run: what `report.json` holds, and what the summary shows."""

from __future__ import annotations

from pydantic import Field

from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.progress import Progress
from shardtune.core.record import Record


class BeforeAfter(Record):
    """One held-out set, before training and after it."""

    before: EvalFigures | None
    """Null for a resumed run whose metrics are lost."""
    after: EvalFigures


class TaskFigures(Record):
    """The score of one task: the mean over its rows, with its confidence interval."""

    metric: str
    score: float
    """From 0 to 1."""
    low: float
    """Lower end of the 95 % confidence interval."""
    high: float
    """Its upper end."""
    rows: int
    """Number of questions."""
    seconds: float
    """Time that they took."""


class TaskReport(Record):
    """One task of `evaluate.tasks`, before training and after it."""

    before: TaskFigures | None
    """Null for a resumed run whose metrics are lost, or that was begun without the task."""
    after: TaskFigures
    seconds: float
    """Time that the task took in the whole run."""


class SampleAnswers(Record):
    """A held-out prompt, and the model's answers before and after."""

    prompt: str
    reference: str
    """The answer in the data."""
    before: str
    after: str


class TrainingReport(Record):
    """How far the run came, and how fast."""

    step: int
    """Optimizer steps done."""
    tokens: int
    seconds: float
    first_loss: float | None
    last_loss: float | None
    tokens_per_second: float
    """Over all ranks, at the end."""
    utilisation: float | None
    """Share of the time in which ranks didn't wait for each other, at the end; null if unknown."""
    skipped: int
    """Steps whose gradient wasn't finite."""
    skipped_in_a_row: int
    stopped: bool
    """Ended before its last step, because a person or the cluster asked for it."""
    preempted: bool
    peak_memory_gib: float
    """On the fullest rank."""

    @staticmethod
    def of(progress: Progress, peak_memory_gib: float) -> TrainingReport:
        return TrainingReport(
            step=progress.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            first_loss=progress.first_loss,
            last_loss=progress.last_loss,
            tokens_per_second=progress.tokens_per_second,
            utilisation=progress.utilisation,
            skipped=progress.skipped,
            skipped_in_a_row=progress.skipped_in_a_row,
            stopped=progress.stopped,
            preempted=progress.preempted,
            peak_memory_gib=peak_memory_gib,
        )


class ResultReport(Record):
    """The adapter or model that the run wrote, read back and compared."""

    path: str
    kind: str
    """The adapter's type, or `full fine-tune`."""
    largest_difference: float | None
    """Of the logits, before saving and after reading back."""
    step: int | None = None
    """The step whose weights it has; left out where it is the last."""


class Compared(Record):
    """A predicted figure beside the measured one."""

    predicted: float
    measured: float
    error: float | None
    """predicted / measured - 1; null where nothing was measured."""

    @staticmethod
    def of(predicted: float, measured: float) -> Compared:
        error = predicted / measured - 1 if measured else None
        return Compared(predicted=predicted, measured=measured, error=error)


class HeldBytes(Record):
    """What a rank holds between two steps."""

    params: Compared
    grads: Compared
    optim: Compared


class ForecastCheck(Record):
    """The forecast beside what was measured."""

    held_bytes: HeldBytes
    peak_gib: Compared | None
    """Null on a device without a count of allocated memory."""
    tokens_per_second: Compared | None


class BestReport(Record):
    """The best step by the metric of `save.best`."""

    metric: str
    value: float
    step: int


class EarlyStopReport(Record):
    """Why a run ended before its last step."""

    metric: str
    value: float | None
    """The best one; null where none was finite."""
    waited: int
    """Evaluations since then."""


class RunReport(Record):
    """The report of a run that has ended."""

    finished: bool
    """False if it was stopped before its last step."""
    directory: str
    ranks: int
    training: TrainingReport
    evaluation: dict[str, BeforeAfter]
    """By the name of the held-out set."""
    samples: tuple[SampleAnswers, ...]
    result: ResultReport
    forecast: ForecastCheck | None
    """Null for a model or a device that the planner doesn't know."""
    best: BestReport | None = None
    """Null without `save.best`."""
    early_stop: EarlyStopReport | None = None
    """Null for a run that wasn't stopped by `train.early_stop`."""
    tasks: dict[str, TaskReport] = Field(default_factory=dict)
    """By the name of the task."""
