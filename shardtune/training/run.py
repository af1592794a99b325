"""What a run does besides training: begin, resume, evaluate, save, finish.

Every rank calls the same methods in the same order. All of them compute; rank 0 also writes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.checkpoint.async_saver import AsyncSaver, CheckpointIdentity
from shardtune.checkpoint.commit_by_rename import checkpoint_name, quarantine, remove_partial
from shardtune.checkpoint.digest import digest_rng_state, digest_tensors, trace_line
from shardtune.checkpoint.disk_space import estimate_disk, require_disk_space
from shardtune.checkpoint.export import check_result, probe_logits, save_result
from shardtune.checkpoint.extension import has_more_patience, is_extended, length
from shardtune.checkpoint.latest import LatestCheckpoint, latest_checkpoint, read_together
from shardtune.checkpoint.model_card import BaseFacts, CardFacts, DataFacts, render_card
from shardtune.checkpoint.overwrite import set_aside_unless_ours, settle, size_aside
from shardtune.checkpoint.reader import Reader
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_in_sight, require_run_id, require_same_data
from shardtune.config.job import AdamW, Job, NoAdapter
from shardtune.core.curve_warnings import CurveWatch
from shardtune.core.engine import Engine
from shardtune.core.metrics import (
    CurveWarning,
    EvaluationMetrics,
    LossSpike,
    MetricsLine,
    NonfiniteGradient,
    StepMetrics,
    TaskMetrics,
)
from shardtune.core.progress import Progress
from shardtune.core.run_history import follow
from shardtune.core.run_report import (
    BeforeAfter,
    BestReport,
    EarlyStopReport,
    ForecastCheck,
    ResultReport,
    RunReport,
    SampleAnswers,
    TaskFigures,
    TaskReport,
    TrainingReport,
)
from shardtune.core.step import EvalResult, MicroBatch, Reading, StepResult
from shardtune.core.step_parts import StepParts
from shardtune.core.units import GIB
from shardtune.data.dataset import PreparedData
from shardtune.data.loader import Loader
from shardtune.data.summarise import summarise
from shardtune.errors import Problem, RunError
from shardtune.launch.process_group import JoinedWorld
from shardtune.models.catalogue import BUILT_IN, public_name
from shardtune.models.load import COMPUTE_DTYPES, held_precision
from shardtune.models.load_result import load_result
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.gptq import E4M3
from shardtune.plan.run_forecast import RunForecast
from shardtune.report.live import RunView
from shardtune.report.run_page import PAGE_FILE, try_write_run_page
from shardtune.training.dead_adapters import dead_adapter_warning, dead_adapters
from shardtune.training.environment import describe_environment
from shardtune.training.evaluation import Evaluation, Evaluator
from shardtune.training.meter import peak_memory
from shardtune.training.respondent_model import ModelRespondent
from shardtune.training.scheduled_tasks import ScheduledTask, due, measure_task
from shardtune.training.time_left import TimeLeft
from shardtune.training.watched_metric import Watch

if TYPE_CHECKING:
    from torch import Tensor


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
    watch: CurveWatch = field(default_factory=CurveWatch)
    measured: dict[int, Evaluation] = field(default_factory=dict)
    """What was found last, by its step."""

    def begin(self) -> Progress:
        """Writes down what is about to run, and evaluates the model as it is."""
        self._require_disk_space()
        run = self.files.run_id() or secrets.token_hex(8)
        self.files.begin(self.job, describe_environment(self.world, run, self.data))
        if self.world.is_main:
            settle(self.files)  # a run that this one overwrites
        self.evaluate(Progress(), whole=True)
        answers = self._answers()
        if self.world.is_main:
            self.files.write_answers(answers)
        return Progress()

    def resume(self) -> Progress:
        """Goes on after the newest good checkpoint; from the start if there never was one."""
        found = self._latest()
        if found.checkpoint is None:
            self.view.say("no checkpoint yet: starting from the first step")
            return self.begin()
        self._require_disk_space()
        others = self.sets.other_digests() if self.sets is not None else None
        require_same_data(self.files, self.data, others)
        path, manifest = found.checkpoint
        if manifest.step > self.view.steps:
            fact = f"has done {manifest.step} steps already; this job has {self.view.steps}"
            raise RunError(
                Problem(str(self.files.path), fact, "give it more, or begin another run")
            )
        state = Reader(path, manifest)
        shards, _ = self.engine.shards()
        state.refuse_other_weights({p.key: p for p in shards if p.key.startswith("weight.")})
        self.engine.load_state(state, manifest.numbers)
        self.files.mark_saved()
        self.files.forget_after(manifest.step)
        if self.world.is_main:  # who says what the curves show
            self._recall()
        by = f"written by {manifest.strategy} on {manifest.ranks} ranks"
        self.view.say(f"resuming after step {manifest.step}, from {path} ({by})")
        if manifest.step == self.view.steps:
            self.view.say("all steps are done: writing the result from this checkpoint")
        elif self.ends_early(manifest.progress):
            self.view.say("the run was stopped early: writing its result")
        begun = self.files.read_job()
        self.world.barrier()  # all have read it before it is written
        if begun is not None and is_extended(begun, self.job):
            self.view.say(self._new_length(begun))
        if begun is not None and (
            is_extended(begun, self.job) or has_more_patience(begun, self.job)
        ):
            self.files.extend(begun, self.job)
        progress = manifest.progress
        if self.watched and self.evaluates(progress.step) and progress.judged_step < progress.step:
            # It was preempted before this evaluation, which decides as it would have then.
            progress = self.judge(progress)
        return progress

    def _recall(self) -> None:
        """Shows the run's past to the watch: what was said before isn't said again."""
        found = follow(self.files.path)
        while found.lines:
            for line in found.lines:
                self.watch.see(line)
            found = follow(self.files.path, found.position)

    def _new_length(self, begun: Job) -> str:
        """How long the run is now, and what that means for the rate."""
        train, steps = self.job.train, self.view.steps
        rate = f"the schedule ({train.schedule}) goes on as in a run of {steps} steps"
        if train.schedule_start:
            rate = f"the schedule ({train.schedule}) begins anew after step {train.schedule_start}"
        return f"the run was begun with {length(begun.train)} and has {steps} steps now; {rate}"

    def _latest(self) -> LatestCheckpoint:
        """What to go on from. Damaged checkpoints are named, and put where none is looked for;
        those of other runs are named and left alone."""
        folder = self.files.checkpoints
        if self.world.is_main:
            remove_partial(folder)
        self.world.barrier()
        found = latest_checkpoint(folder, require_run_id(self.files), self.world)
        for path, why in found.others:
            self.view.warn(f"{path}: {why}; left alone")
        if found.checkpoint is None:
            require_in_sight(self.files)
        for path, why in found.damaged:
            aside = quarantine(path).name if self.world.is_main else path.name
            self.view.warn(f"{path} is damaged: {why}; set aside as {aside}")
        self.world.barrier()
        return found

    def _require_disk_space(self) -> None:
        """Refuses a disk on which the run's checkpoints and result will not fit."""
        shards, _ = self.engine.shards()
        mine = sum(shard.region.size for shard in shards if shard.key.startswith("weight."))
        trained = sum(map(int, self.world.all_gather(str(mine))))
        rule, save = self.job.train.optimizer, self.job.save
        whole = isinstance(self.job.adapter, NoAdapter)
        saves = save.every or save.best is not None
        need = estimate_disk(
            trained,
            2 if isinstance(rule, AdamW) else int(rule.momentum > 0),
            keep=save.keep + (save.best is not None),
            saves=-(-self.view.steps // (1 if save.best else save.every)) if saves else 1,
            result=trained * (self.model.dtype.itemsize if whole else 4),
        )
        require_disk_space(self.files.path, need, size_aside(self.files))

    def log(
        self,
        progress: Progress,
        result: StepResult,
        reading: Reading,
        *,
        epoch: float,
        samples: Sequence[str],
        parts: StepParts | None = None,
    ) -> None:
        """Shows the step and adds it to the metrics, with a digest of the samples it saw."""
        left = self.clock.after(progress.step, reading.seconds_left)
        reading = replace(reading, seconds_left=left)
        self.view.step(progress.step, result, reading)
        digest = hashlib.sha256("\n".join(samples).encode()).hexdigest()
        step = progress.step
        self._keep(
            StepMetrics.of(step, result, reading, epoch=epoch, samples_sha256=digest, parts=parts)
        )
        if self.job.save.trace:
            self._trace(step, result, digest)

    def note(self, note: LossSpike | NonfiniteGradient | CurveWarning) -> None:
        """Something that a person should know about a step, on the screen and in the metrics."""
        self.view.warn(f"step {note.step}: {note.fact}")
        self._keep(note)

    def _keep(self, line: MetricsLine) -> None:
        """Adds a line to the metrics. What the curves say is wrong with it is said, once."""
        self.files.jsonl.log(line)
        for warning in self.watch.see(line) if self.world.is_main else ():
            self.note(warning)

    def _trace(self, step: int, result: StepResult, samples: str) -> None:
        """The step to the bit, on all ranks together."""
        drawn = "".join(self.world.all_gather(digest_rng_state(self.world.device)))
        random = hashlib.sha256(drawn.encode()).hexdigest()
        tensors, _ = self.engine.state()
        if self.world.is_main:
            state = digest_tensors(tensors)
            line = trace_line(step, result, samples=samples, random=random, state=state)
            self.files.jsonl.log_trace(line)

    @property
    def watched(self) -> Watch:
        """What decides on the end of the run, and on the step that its result is written from."""
        return Watch.of(self.job)

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

    def evaluates(self, step: int) -> bool:
        """Whether anything is evaluated after this step."""
        intervals = [int(self.job.evaluate.every), *(each.every for each in self.tasks)]
        return any(due(step, every) for every in intervals)

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
                self._keep(line)
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
            self._keep(TaskMetrics(kind="task", step=step, task=name, **dict(found)))
        return found

    def _answers(self) -> list[str]:
        """Of the model as it is now to a few held-out prompts."""
        with (
            self.clock.timed("answer"),
            self.view.phase("answering held-out prompts", self.clock.run) as progress,
        ):
            return self.evaluator.answers(progress)

    def prepare_saving(self) -> None:
        """Gets memory for the first checkpoint while training goes on, if one comes before the end.
        Call it after a step, when there is all that it will have."""
        if (self.job.save.every or self.job.save.best) and self.job.save.background:
            self.saver.prepare(self.engine.shards()[0])

    def save(self, progress: Progress) -> None:
        """Begins a checkpoint that `resume` goes on from, when an earlier one is through."""
        with self._failing_softly():
            self.saver.wait()
        job = hashlib.sha256(self.job.model_dump_json().encode()).hexdigest()
        run = require_run_id(self.files)
        identity = CheckpointIdentity(run, progress.step, self.job.strategy.type, job)
        with self._failing_softly():
            shards, numbers = self.engine.shards()
            self.saver.save(identity, shards, numbers, progress, self.files.jsonl.sync)

    def keep_saving(self) -> None:
        """Completes a checkpoint that all ranks have written meanwhile. Call it after each step."""
        with self._failing_softly():
            self.saver.poll()

    def saved(self) -> None:
        """Returns when the last checkpoint is complete; RunError if it can't be."""
        with self._failing_softly():
            self.saver.wait()
        if self.saver.failure is not None:
            raise self.saver.failure

    @contextmanager
    def _failing_softly(self) -> Iterator[None]:
        """A checkpoint that failed costs no training, unless the job says so. Every rank knows."""
        try:
            yield
        except RunError as error:
            if self.job.save.on_failure == "stop":
                raise
            self.view.warn(f"{error}\n    training goes on; the next is tried when due", "red")

    def finish(self, progress: Progress, probe: MicroBatch) -> RunReport | None:
        """Evaluates, saves, reads back and compares; only then is a run done. Rank 0 has the
        report."""
        weights = self._restore_best(progress)
        step = weights.step
        found = self.evaluate(weights, whole=True, logged=step == progress.step)
        peak = self.world.max(peak_memory(self.world.device)) / GIB
        # What needs every rank comes first: a model that is spread answers only together.
        answers = self._answers()
        trained = self._trained_weights()
        logits = probe_logits(self.engine.module(), probe, self.world.device)
        report: RunReport | None = None
        if self.world.is_main:
            self.view.say("saving the result, and reading it back")
            with self.view.phase("saving the result, and reading it back", self.clock.run):
                training = TrainingReport.of(progress, peak)
                evaluation = self._before_and_after(found.sets)
                facts = self._card_facts(training, evaluation)
                best = None if step == progress.step else step
                card = render_card(replace(facts, best_step=best))
                difference = self._save_result(trained, logits, probe, card)
            report = RunReport(
                finished=not progress.stopped,
                directory=str(self.files.path),
                ranks=self.world.size,
                training=training,
                evaluation=evaluation,
                samples=self._samples(answers),
                result=ResultReport(
                    path=str(self.files.result),
                    kind=self.job.trains,
                    largest_difference=difference,
                    **({"step": step} if step != progress.step else {}),
                ),
                forecast=self._beside_forecast(progress, peak),
                tasks=self._tasks(found.tasks),
                best=self._best(progress),
                early_stop=self._early_stop(progress),
            )
            if dead := dead_adapters(trained, weights.step - weights.skipped):
                warning = dead_adapter_warning(weights.step, dead)
                if self.watch.is_news(warning):
                    self.note(warning)
            self.files.write_report(report)
            self._write_page()
        self.world.barrier()
        return report

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

    def _write_page(self) -> None:
        if self.files.owns(PAGE_FILE):
            try_write_run_page(self.files.path, self.view.warn)

    def _restore_best(self, progress: Progress) -> Progress:
        """Puts the weights of the best step back into the engine; returns how far the run was when
        it had the weights that it has now. A checkpoint that is lost costs the result no more than
        being the best."""
        step = progress.best_step
        if self.job.save.best is None or step is None or step == progress.step:
            return progress
        path = self.files.checkpoints / checkpoint_name(step)
        found = read_together(path, require_run_id(self.files), self.world)
        if isinstance(found, str):
            last = f"the result is written from step {progress.step}"
            self.view.say(f"{path}, the best, can't be used: {found}; {last}", "red")
            return progress
        self.engine.load_state(Reader(path, found), found.numbers)
        best = f"{self.job.save.best.metric} {progress.best_value:.6g}"
        self.view.say(f"writing the result from step {step}, the best ({best})")
        return found.progress

    def _best(self, progress: Progress) -> BestReport | None:
        best, value, step = self.job.save.best, progress.best_value, progress.best_step
        if best is None or value is None or step is None:
            return None
        return BestReport(metric=best.metric, value=value, step=step)

    def _early_stop(self, progress: Progress) -> EarlyStopReport | None:
        stop = self.job.train.early_stop
        if stop is None or not self.ends_early(progress):
            return None
        waited = progress.early_stop_waited
        return EarlyStopReport(metric=stop.metric, value=progress.early_stop_value, waited=waited)

    def _beside_forecast(self, progress: Progress, peak_gib: float) -> ForecastCheck | None:
        """Predicted beside measured; of a processor we can measure only what the engine holds."""
        if self.predicted is None:
            return None
        on_gpu = self.world.device != "cpu"
        return self.predicted.compare(
            self.engine.held(),
            peak=peak_gib * GIB if on_gpu else None,
            tokens_per_second=progress.tokens_per_second if on_gpu else None,
        )

    def _before_and_after(self, results: Sequence[EvalResult]) -> dict[str, BeforeAfter]:
        before = self.files.jsonl.evaluations(step=0)
        return {
            result.name: BeforeAfter(before=before.get(result.name), after=result.summary())
            for result in results
        }

    def _tasks(self, after: Mapping[str, TaskFigures]) -> dict[str, TaskReport]:
        logs = self.files.jsonl
        before = logs.tasks(step=0)
        return {
            name: TaskReport(before=before.get(name), after=found, seconds=logs.task_seconds(name))
            for name, found in after.items()
        }

    def _samples(self, after: Sequence[str]) -> tuple[SampleAnswers, ...]:
        # A resumed run may show more or fewer samples than the one that began.
        before = (self.files.read_answers() + [""] * len(after))[: len(after)]
        return tuple(
            SampleAnswers(prompt=asked.prompt, reference=asked.reference, before=old, after=new)
            for asked, old, new in zip(self.evaluator.questions(), before, after, strict=True)
        )

    def _trained_weights(self) -> dict[str, Tensor]:
        """All of them in the main rank's memory, beside its device; others only take part."""
        found: dict[str, Tensor] = {}
        for name, weight in self.engine.trained_weights():
            if self.world.is_main:
                found[name] = weight.cpu()
        return found

    def _card_facts(
        self, training: TrainingReport, evaluation: Mapping[str, BeforeAfter]
    ) -> CardFacts:
        """What the model card says; of the machine only the versions."""
        name = self.job.model.name
        built_in = BUILT_IN.get(name)
        on_hub = built_in is None and not Path(self.model.path).is_dir()
        base = BaseFacts(public_name(name), on_hub, built_in.licence if built_in else None)
        sides = (("train", self.sets.train), ("eval", self.sets.eval)) if self.sets else ()
        data = [
            DataFacts(
                side,
                each.name,
                each.report.format,
                each.report.documents,
                each.report.tokens,
                each.report.labels,
                each.digest,
            )
            for side, sets in sides
            for each in sets
        ]
        made = describe_environment(self.world, "", self.data)
        versions = {"shardtune": made.shardtune, "Python": made.python, **made.packages}
        return CardFacts(self.job, base, data, training, evaluation, versions, self.model.kind)

    def _save_result(
        self, trained: Mapping[str, Tensor], logits: Tensor, probe: MicroBatch, card: str
    ) -> float:
        job, target, evaluator = self.job, self.files.result, self.evaluator
        if (aside := set_aside_unless_ours(target)) is not None:
            self.view.say(f"{target} holds what no run of ours wrote: set aside as {aside.name}")
        written = save_result(
            self.engine.module(),
            trained,
            evaluator.tokenizer,
            evaluator.stops,
            target,
            dtype=self.model.dtype,
            base=(self.model.path, public_name(job.model.name)),
            card=card,
        )
        reloaded = load_result(str(target), self.model, held_precision(job.adapter, job.train))
        in_8_bits = job.model.quantization == "fp8"
        computed = E4M3 if in_8_bits else COMPUTE_DTYPES[job.train.compute_precision]
        return check_result(reloaded, trained, logits, probe, written=written, computed=computed)
