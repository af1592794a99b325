"""What a run does besides training: begin, resume, finish.

Its log, its evaluations, its checkpoints and its result are parts with files of their own. Every
rank calls the same methods in the same order. All of them compute; rank 0 also writes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardtune.checkpoint.async_saver import AsyncSaver
from shardtune.checkpoint.export import probe_logits
from shardtune.checkpoint.extension import has_more_patience, is_extended, length
from shardtune.checkpoint.overwrite import settle
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_same_data
from shardtune.config.job import Job
from shardtune.core.engine import Engine
from shardtune.core.progress import Progress
from shardtune.core.runs.run_report import ResultReport, RunReport, TrainingReport
from shardtune.core.step import MicroBatch
from shardtune.core.units import GIB
from shardtune.data.dataset import PreparedData
from shardtune.data.loader import Loader
from shardtune.data.summarise import summarise
from shardtune.errors import Problem, RunError
from shardtune.launch.process_group import JoinedWorld
from shardtune.models.model_files import ModelFiles
from shardtune.plan.run_forecast import RunForecast
from shardtune.report.live import RunView
from shardtune.report.run_page import PAGE_FILE, try_write_run_page
from shardtune.training import final_figures as figures
from shardtune.training.dead_adapters import dead_adapter_warning, dead_adapters
from shardtune.training.environment import describe_environment
from shardtune.training.evaluation import Evaluator
from shardtune.training.meter import peak_memory
from shardtune.training.respondent_model import ModelRespondent
from shardtune.training.run_checkpoints import RunCheckpoints
from shardtune.training.run_evaluations import RunEvaluations
from shardtune.training.run_log import RunLog
from shardtune.training.run_result import RunResult
from shardtune.training.scheduled_tasks import ScheduledTask
from shardtune.training.time_left import TimeLeft


@dataclass(frozen=True)
class Run:
    """One rank's run."""

    job: Job
    world: JoinedWorld
    model: ModelFiles
    engine: Engine
    evaluator: Evaluator
    files: RunDir
    view: RunView
    data: Mapping[str, str]
    """The digest of each data set."""
    saver: AsyncSaver
    predicted: RunForecast | None = None
    """What was predicted for it; None for a model or a device that the planner doesn't know."""
    clock: TimeLeft = field(default_factory=TimeLeft)
    sets: PreparedData | None = None
    """The data sets, for the model card."""
    tasks: Sequence[ScheduledTask] = ()
    respondent: ModelRespondent | None = None
    """Who answers their questions."""

    @cached_property
    def log(self) -> RunLog:
        return RunLog(self.job, self.world, self.engine, self.files, self.view, self.clock)

    @cached_property
    def evaluations(self) -> RunEvaluations:
        return RunEvaluations(
            self.job,
            self.world,
            self.evaluator,
            self.view,
            self.clock,
            self.log,
            self.tasks,
            self.respondent,
        )

    @cached_property
    def checkpoints(self) -> RunCheckpoints:
        return RunCheckpoints(
            self.job, self.world, self.model, self.engine, self.files, self.view, self.saver
        )

    def begin(self) -> Progress:
        """Writes down what is about to run, and evaluates the model as it is."""
        self.checkpoints.require_disk_space()
        run = self.files.run_id() or secrets.token_hex(8)
        self.files.begin(self.job, describe_environment(self.world, run, self.data))
        if self.world.is_main:
            settle(self.files)  # a run that this one overwrites
        self.evaluations.evaluate(Progress(), whole=True)
        answers = self.evaluations.answers()
        if self.world.is_main:
            self.files.write_answers(answers)
        return Progress()

    def resume(self) -> Progress:
        """Goes on after the newest good checkpoint; from the start if there never was one."""
        found = self.checkpoints.latest()
        if found.checkpoint is None:
            self.view.say("no checkpoint yet: starting from the first step")
            return self.begin()
        self.checkpoints.require_disk_space()
        others = self.sets.other_digests() if self.sets is not None else None
        require_same_data(self.files, self.data, others)
        path, manifest = found.checkpoint
        if manifest.step > self.view.steps:
            fact = f"has done {manifest.step} steps already; this job has {self.view.steps}"
            raise RunError(
                Problem(str(self.files.path), fact, "give it more, or begin another run")
            )
        self.checkpoints.restore(path, manifest)
        self.files.mark_saved()
        self.files.forget_after(manifest.step)
        self.log.recall()
        by = f"written by {manifest.strategy} on {manifest.ranks} ranks"
        self.view.say(f"resuming after step {manifest.step}, from {path} ({by})")
        self.files.note_resume(manifest.step, f"went on after step {manifest.step}, {by}")
        if manifest.step == self.view.steps:
            self.view.say("all steps are done: writing the result from this checkpoint")
        elif self.evaluations.ends_early(manifest.progress):
            self.view.say("the run was stopped early: writing its result")
        self._extend()
        progress, evaluations = manifest.progress, self.evaluations
        unjudged = progress.judged_step < progress.step
        if evaluations.watched and evaluations.due(progress.step) and unjudged:
            # It was preempted before this evaluation, which decides as it would have then.
            progress = evaluations.judge(progress)
        return progress

    def _extend(self) -> None:
        """Writes down a job that is longer, or more patient, than the one that was begun."""
        begun = self.files.read_job()
        self.world.barrier()  # all have read it before it is written
        if begun is None:
            return
        extended = is_extended(begun, self.job)
        if extended:
            self.view.say(self._new_length(begun))
        if extended or has_more_patience(begun, self.job):
            self.files.extend(begun, self.job)

    def _new_length(self, begun: Job) -> str:
        """How long the run is now, and what that means for the rate."""
        train, steps = self.job.train, self.view.steps
        rate = f"the schedule ({train.schedule}) goes on as in a run of {steps} steps"
        if train.schedule_start:
            rate = f"the schedule ({train.schedule}) begins anew after step {train.schedule_start}"
        return f"the run was begun with {length(begun.train)} and has {steps} steps now; {rate}"

    def describe_data(self, loader: Loader) -> None:
        """Keeps what the run trains on, for its page. A resumed run has that already."""
        files, length = self.files, self.job.data.sequence_length
        there = (files.path / "data.json").exists()
        if self.sets is None or there or not (files.writes and files.owns("data.json")):
            return
        try:
            files.write_data(summarise(self.sets, loader, self.evaluator.tokenizer, length))
        except Exception as error:  # noqa: BLE001 - a page is no reason to lose a run
            self.view.warn(f"data.json was not written: {type(error).__name__}: {error}")

    def finish(self, progress: Progress, probe: MicroBatch) -> RunReport | None:
        """Evaluates, saves, reads back and compares; only then is a run done. Rank 0 has the
        report."""
        result = RunResult(
            self.job,
            self.world,
            self.model,
            self.engine,
            self.evaluator,
            self.files,
            self.view,
            self.data,
            self.sets,
        )
        weights = self.checkpoints.restore_best(progress)
        step = weights.step
        found = self.evaluations.evaluate(weights, whole=True, logged=step == progress.step)
        peak = self.world.max(peak_memory(self.world.device)) / GIB
        # What needs every rank comes first: a model that is spread answers only together.
        answers = self.evaluations.answers()
        trained = result.gather()
        logits = probe_logits(self.engine.module(), probe, self.world.device)
        report: RunReport | None = None
        if self.world.is_main:
            self.view.say("saving the result, and reading it back")
            with self.view.phase("saving the result, and reading it back", self.clock.run):
                training = TrainingReport.of(progress, peak)
                evaluation = figures.before_and_after(self.files, found.sets)
                best = None if step == progress.step else step
                card = result.card(training, evaluation, best)
                difference = result.write(trained, logits, probe, card)
            ended_early = self.evaluations.ends_early(progress)
            report = RunReport(
                finished=not progress.stopped,
                directory=str(self.files.path),
                ranks=self.world.size,
                training=training,
                evaluation=evaluation,
                samples=figures.sample_answers(self.files, self.evaluator, answers),
                result=ResultReport(
                    path=str(self.files.result),
                    kind=self.job.trains,
                    largest_difference=difference,
                    **({"step": step} if step != progress.step else {}),
                ),
                forecast=figures.beside_forecast(
                    self.predicted,
                    self.engine,
                    on_gpu=self.world.device != "cpu",
                    peak_gib=peak,
                    tokens_per_second=progress.tokens_per_second,
                ),
                tasks=figures.task_reports(self.files, found.tasks),
                best=figures.best_report(self.job, progress),
                early_stop=figures.early_stop_report(self.job, progress) if ended_early else None,
            )
            if dead := dead_adapters(trained, weights.step - weights.skipped):
                warning = dead_adapter_warning(weights.step, dead)
                if self.log.watch.is_news(warning):
                    self.log.note(warning)
            self.files.write_report(report)
            if self.files.owns(PAGE_FILE):
                try_write_run_page(self.files.path, self.view.warn)
        self.world.barrier()
        return report
