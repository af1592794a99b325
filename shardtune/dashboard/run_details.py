"""What the page of a run shows beside its curves, and what sets compared runs apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardtune.core.files.yaml_leaves import Scalar
from shardtune.core.record import Record
from shardtune.core.runs.run_environment import RunEnvironment
from shardtune.core.runs.run_history import LauncherEvent, StepForecast
from shardtune.core.runs.run_report import BeforeAfter, SampleAnswers, TaskReport
from shardtune.dashboard.metric_columns import Curve, MetricCurves
from shardtune.dashboard.run_folder import printable
from shardtune.dashboard.run_row import RunRow, RunSummary
from shardtune.report.comparison_page import job_differences
from shardtune.report.drawn_figures import DRAWN_FIGURES, DrawnFigure
from shardtune.report.run_page import PAGE_FILE


class CheckpointSave(Record):
    """A checkpoint that is there now."""

    step: int
    time: float
    """When it was complete, in seconds since the epoch."""


class RunDetails(Record):
    """A run without its curves. Null where a file is missing."""

    run: RunRow
    path: str
    job: str
    """`job.yaml` as it is."""
    figures: tuple[DrawnFigure, ...]
    """The charts of a step, beside that of the loss."""
    forecast: StepForecast | None
    """Of a run on GPUs: of a processor that nobody has measured too little is known."""
    environment: RunEnvironment | None
    events: tuple[LauncherEvent, ...]
    """Faults, restarts, slow ranks."""
    saves: tuple[CheckpointSave, ...]
    evaluation: dict[str, BeforeAfter]
    """By held-out set, of a run that has come to its end."""
    tasks: dict[str, TaskReport]
    """By task, of such a run."""
    samples: tuple[SampleAnswers, ...]
    has_page: bool
    """Whether the run has left its own page, `report.html`."""
    result: str | None
    """Where the adapter or model is."""


class DifferingValue(Record):
    """A value in which jobs differ, in the order of the runs; null where a job has none."""

    key: str
    values: tuple[Scalar, ...]


class ComparedRun(Record):
    """One of the compared runs."""

    run: RunRow
    loss: Curve
    smoothed: Curve
    evaluations: dict[str, Curve]
    tasks: dict[str, Curve]


class RunComparison(Record):
    """Runs side by side."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[DifferingValue, ...]
    alike: int
    """How many values of the jobs are the same."""


def run_details(summary: RunSummary) -> RunDetails:
    history = summary.history
    report, environment = history.report, history.environment
    return RunDetails(
        run=summary.row,
        path=printable(history.path),
        job=history.job_text,
        figures=DRAWN_FIGURES,
        forecast=history.forecast if environment and environment.gpus else None,
        environment=environment,
        events=history.events[-200:],
        saves=tuple(CheckpointSave(step=each.step, time=each.time) for each in history.saves),
        evaluation=report.evaluation if report else {},
        tasks=report.tasks if report else {},
        samples=report.samples[:20] if report else (),
        has_page=(history.path / PAGE_FILE).is_file(),
        result=report.result.path if report else None,
    )


def compare_runs(summaries: Sequence[RunSummary], curves: Iterable[MetricCurves]) -> RunComparison:
    differing = job_differences([each.history for each in summaries])
    keys = {key for each in summaries for key in each.history.job}
    return RunComparison(
        runs=tuple(
            ComparedRun(
                run=summary.row,
                loss=found.figures["loss"],
                smoothed=found.smoothed,
                evaluations=found.evaluations,
                tasks=found.tasks,
            )
            for summary, found in zip(summaries, curves, strict=True)
        ),
        differences=tuple(
            DifferingValue(key=key, values=values) for key, values in differing.items()
        ),
        alike=len(keys) - len(differing),
    )
