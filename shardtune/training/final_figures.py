"""The parts of a run's report that compare: before and after, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import Job
from shardtune.core.engine import Engine
from shardtune.core.progress import Progress
from shardtune.core.runs.run_report import (
    BeforeAfter,
    BestReport,
    EarlyStopReport,
    ForecastCheck,
    SampleAnswers,
    TaskFigures,
    TaskReport,
)
from shardtune.core.step import EvalResult
from shardtune.core.units import GIB
from shardtune.plan.run_forecast import RunForecast
from shardtune.training.evaluation import Evaluator


def before_and_after(files: RunDir, results: Sequence[EvalResult]) -> dict[str, BeforeAfter]:
    """Each held-out set at the run's beginning and now."""
    before = files.jsonl.evaluations(step=0)
    return {
        result.name: BeforeAfter(before=before.get(result.name), after=result.summary())
        for result in results
    }


def task_reports(files: RunDir, after: Mapping[str, TaskFigures]) -> dict[str, TaskReport]:
    """Each task at the run's beginning and now, and the time that it took in all."""
    logs = files.jsonl
    before = logs.tasks(step=0)
    return {
        name: TaskReport(before=before.get(name), after=found, seconds=logs.task_seconds(name))
        for name, found in after.items()
    }


def sample_answers(
    files: RunDir, evaluator: Evaluator, after: Sequence[str]
) -> tuple[SampleAnswers, ...]:
    """A few held-out prompts, answered at the run's beginning and now."""
    # A resumed run may show more or fewer samples than the one that began.
    before = (files.read_answers() + [""] * len(after))[: len(after)]
    return tuple(
        SampleAnswers(prompt=asked.prompt, reference=asked.reference, before=old, after=new)
        for asked, old, new in zip(evaluator.questions(), before, after, strict=True)
    )


def best_report(job: Job, progress: Progress) -> BestReport | None:
    """The best step, where the job asks for it."""
    best, value, step = job.save.best, progress.best_value, progress.best_step
    if best is None or value is None or step is None:
        return None
    return BestReport(metric=best.metric, value=value, step=step)


def early_stop_report(job: Job, progress: Progress) -> EarlyStopReport | None:
    """Why a run ended early; only of one that did."""
    stop = job.train.early_stop
    if stop is None:
        return None
    waited = progress.early_stop_waited
    return EarlyStopReport(metric=stop.metric, value=progress.early_stop_value, waited=waited)


def beside_forecast(
    predicted: RunForecast | None,
    engine: Engine,
    *,
    on_gpu: bool,
    peak_gib: float,
    tokens_per_second: float,
) -> ForecastCheck | None:
    """Predicted beside measured; of a processor we can measure only what the engine holds."""
    if predicted is None:
        return None
    return predicted.compare(
        engine.held(),
        peak=peak_gib * GIB if on_gpu else None,
        tokens_per_second=tokens_per_second if on_gpu else None,
    )
