"""The metric that early stopping and the best checkpoint go by: a held-out figure, or a task's
score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardtune.config.job import BestCheckpoint, EarlyStop, Job
from shardtune.core.progress import Progress
from shardtune.core.step import EvalResult
from shardtune.errors import JobError, Problem, did_you_mean
from shardtune.training.evaluation import Evaluation
from shardtune.training.scheduled_tasks import ScheduledTask

HELD_OUT_FIGURES = ("loss", "perplexity", "accuracy")
"""Of a held-out set, or of all together."""
_LOWER_IS_BETTER = ("loss", "perplexity")


def read_metric(metric: str, found: Evaluation) -> float | None:
    """The value of a metric at one step; None where it was not measured, or isn't finite."""
    if metric in HELD_OUT_FIGURES:
        value = _figure(metric, found.sets)
    elif metric in found.tasks:
        value = found.tasks[metric].score
    else:
        name, _, figure = metric.rpartition(".")
        value = _figure(figure, [each for each in found.sets if each.name == name])
    return value if value is not None and math.isfinite(value) else None


def _figure(figure: str, sets: Sequence[EvalResult]) -> float | None:
    """Over all trained tokens of the sets."""
    labels = sum(each.labels for each in sets)
    if not labels:
        return None
    correct, losses = sum(each.correct for each in sets), sum(each.loss_sum for each in sets)
    together = EvalResult("", losses, correct, labels)
    return {
        "loss": together.loss,
        "perplexity": together.perplexity,
        "accuracy": together.accuracy,
    }[figure]


@dataclass(frozen=True)
class Watch:
    """What a job watches. It decides by what `Progress` remembers, which checkpoints keep to the
    bit: a run that was stopped and resumed decides as one that was not."""

    early_stop: EarlyStop | None = None
    best: BestCheckpoint | None = None

    @staticmethod
    def of(job: Job) -> Watch:
        return Watch(job.train.early_stop, job.save.best)

    def __bool__(self) -> bool:
        return self.early_stop is not None or self.best is not None

    def judge(self, progress: Progress, found: Evaluation) -> Progress:
        """The progress after what was found at its step."""
        step = progress.step
        progress = replace(progress, judged_step=step)
        if (best := self.best) is not None:
            value = read_metric(best.metric, found)
            if value is not None and _improves(best, value, progress.best_value):
                progress = replace(progress, best_value=value, best_step=step)
        if (stop := self.early_stop) is not None:
            value = read_metric(stop.metric, found)
            if value is not None and _improves(
                stop, value, progress.early_stop_value, stop.min_delta
            ):
                progress = replace(progress, early_stop_value=value, early_stop_waited=0)
            elif value is not None or _was_measured(stop.metric, found):
                waited = progress.early_stop_waited + 1
                progress = replace(progress, early_stop_waited=waited)
        return progress

    def out_of_patience(self, progress: Progress) -> bool:
        """Whether the run ends here, before its last step."""
        stop = self.early_stop
        return stop is not None and progress.early_stop_waited >= stop.patience


def _was_measured(metric: str, found: Evaluation) -> bool:
    """Whether a metric without a finite value was looked at: that is no improvement either."""
    return metric in found.tasks or (
        bool(found.sets) and metric.rpartition(".")[2] in HELD_OUT_FIGURES
    )


def _improves(
    watched: EarlyStop | BestCheckpoint, value: float, best: float | None, min_delta: float = 0.0
) -> bool:
    if best is None:
        return True
    gain = best - value if goal_of(watched) == "min" else value - best
    return gain > min_delta


def goal_of(watched: EarlyStop | BestCheckpoint) -> Literal["min", "max"]:
    """`goal`, or what `auto` stands for: less loss, more of anything else."""
    if watched.goal != "auto":
        return watched.goal
    return "min" if watched.metric.rpartition(".")[2] in _LOWER_IS_BETTER else "max"


def require_watchable(job: Job, sets: Sequence[str], tasks: Sequence[ScheduledTask]) -> None:
    """Refuses metrics that the run doesn't measure, or only before and after."""
    every = int(job.evaluate.every)
    names = [
        *HELD_OUT_FIGURES,
        *(f"{name}.{figure}" for name in sets for figure in HELD_OUT_FIGURES),
    ]
    measured = dict.fromkeys(names if sets else [], every)
    measured |= {each.name: each.every for each in tasks if each.name not in measured}
    watched = {"train.early_stop.metric": job.train.early_stop, "save.best.metric": job.save.best}
    problems = []
    for place, section in watched.items():
        if section is None:
            continue
        if section.metric not in measured:
            near = did_you_mean(section.metric, measured)
            fact = f"is {section.metric!r}, which this run doesn't measure"
            known = (
                f"one of {', '.join(measured)}" if measured else "set data.eval or evaluate.tasks"
            )
            problems.append(Problem(place, fact, f"did you mean {near!r}?" if near else known))
        elif not measured[section.metric]:
            fact = f"{section.metric} is measured only before and after the run"
            fix = "set evaluate.every (or the task's `every`) to a number of steps"
            problems.append(Problem(place, fact, fix))
    if problems:
        raise JobError(problems)
