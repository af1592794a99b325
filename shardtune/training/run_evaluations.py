"""A run's evaluations: when they are due, what they find, and what is decided by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardtune.config.job import Job
from shardtune.core.progress import Progress
from shardtune.core.runs.metrics import EvaluationMetrics, TaskMetrics
from shardtune.core.runs.run_report import TaskFigures
from shardtune.core.step import EvalResult
from shardtune.launch.process_group import JoinedWorld
from shardtune.report.live import RunView
from shardtune.training.evaluation import Evaluation, Evaluator
from shardtune.training.respondent_model import ModelRespondent
from shardtune.training.run_log import RunLog
from shardtune.training.scheduled_tasks import ScheduledTask, due, measure_task
from shardtune.training.time_left import TimeLeft
from shardtune.training.watched_metric import Watch


@dataclass(frozen=True)
class RunEvaluations:
    """Held-out sets, tasks and sample answers of one run."""

    job: Job
    world: JoinedWorld
    evaluator: Evaluator
    view: RunView
    clock: TimeLeft
    log: RunLog
    tasks: Sequence[ScheduledTask] = ()
    respondent: ModelRespondent | None = None
    """Who answers their questions."""
    measured: dict[int, Evaluation] = field(default_factory=dict)
    """What was found last, by its step."""

    @property
    def watched(self) -> Watch:
        """What decides on the end of the run, and on the step that its result is written from."""
        return Watch.of(self.job)

    def due(self, step: int) -> bool:
        """Whether anything is evaluated after this step."""
        intervals = [int(self.job.evaluate.every), *(each.every for each in self.tasks)]
        return any(due(step, every) for every in intervals)

    def judge(self, progress: Progress, *, whole: bool = False) -> Progress:
        """Evaluates, and remembers what is watched of it."""
        found = self.evaluate(progress, whole=whole)
        if not self.watched:
            return progress
        judged, stop = self.watched.judge(progress, found), self.job.train.early_stop
        if stop is not None and self.ends_early(judged):
            best = "it was never finite"
            if judged.early_stop_value is not None:
                best = f"the best is {judged.early_stop_value:.6g}"
            fact = f"{stop.metric} has not improved in {judged.early_stop_waited} evaluations"
            self.view.say(f"stopping early after step {progress.step}: {fact}; {best}")
        if judged.best_step == progress.step and self.job.save.best is not None:
            best = f"the best {self.job.save.best.metric} so far: {judged.best_value:.6g}"
            self.view.say(f"after step {progress.step}  {best}", "cyan")
        return judged

    def ends_early(self, progress: Progress) -> bool:
        """Whether a metric has not improved for too long, and steps are left."""
        return progress.step < self.view.steps and self.watched.out_of_patience(progress)

    def evaluate(
        self, progress: Progress, *, whole: bool = False, logged: bool = True
    ) -> Evaluation:
        """What is due of it now, or the `whole`: loss, perplexity and accuracy of each held-out
        set, and the score of each task. What was found at this step isn't computed again."""
        step = progress.step
        known = self.measured.get(step, Evaluation())
        sets, tasks = known.sets, dict(known.tasks)
        if not sets and (whole or due(step, int(self.job.evaluate.every))):
            sets = self._losses(step, logged)
        for each in self.tasks:
            if each.name not in tasks and (whole or each.due(step)):
                tasks[each.name] = self._score(each, step, logged)
        self.measured.clear()
        self.measured[step] = found = Evaluation(sets, tasks)
        return found

    def answers(self) -> list[str]:
        """Of the model as it is now to a few held-out prompts."""
        with (
            self.clock.timed("answer"),
            self.view.phase("answering held-out prompts", self.clock.run) as progress,
        ):
            return self.evaluator.answers(progress)

    def _losses(self, step: int, logged: bool) -> list[EvalResult]:
        with (
            self.clock.timed("evaluate"),
            self.view.phase("evaluating", self.clock.run) as progress,
        ):
            results = self.evaluator.losses(progress)
        self.view.evaluation(step, results)
        for result in results:
            figures = dict(result.summary())
            if logged:
                line = EvaluationMetrics(kind="evaluation", step=step, set=result.name, **figures)
                self.log.keep(line)
        return results

    def _score(self, scheduled: ScheduledTask, step: int, logged: bool) -> TaskFigures:
        assert self.respondent is not None
        name = scheduled.name
        with (
            self.clock.timed(f"task {name}"),
            self.view.phase(f"asking {name}", self.clock.run) as progress,
        ):
            found = measure_task(scheduled, self.respondent, self.world, progress)
        self.view.task(step, name, found)
        if logged:
            self.log.keep(TaskMetrics(kind="task", step=step, task=name, **dict(found)))
        return found
