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
from shardtune.checkpoint.commit_by_rename import quarantine, remove_partial
from shardtune.checkpoint.digest import digest_rng_state, digest_tensors, trace_line
from shardtune.checkpoint.disk_space import estimate_disk, require_disk_space
from shardtune.checkpoint.export import check_result, probe_logits, save_result
from shardtune.checkpoint.extension import is_extended, length
from shardtune.checkpoint.latest import LatestCheckpoint, latest_checkpoint
from shardtune.checkpoint.model_card import BaseFacts, CardFacts, DataFacts, render_card
from shardtune.checkpoint.reader import Reader
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_run_id, require_same_data
from shardtune.config.job import AdamW, Job, NoAdapter
from shardtune.core.engine import Engine
from shardtune.core.metrics import (
    EvaluationMetrics,
    LossSpike,
    NonfiniteGradient,
    StepMetrics,
)
from shardtune.core.progress import Progress
from shardtune.core.run_report import (
    BeforeAfter,
    ForecastCheck,
    ResultReport,
    RunReport,
    SampleAnswers,
    TrainingReport,
)
from shardtune.core.step import EvalResult, MicroBatch, Reading, StepResult
from shardtune.core.units import GIB
from shardtune.data.dataset import PreparedData
from shardtune.errors import Problem, RunError
from shardtune.launch.process_group import JoinedWorld
from shardtune.models.catalogue import BUILT_IN, public_name
from shardtune.models.load import COMPUTE_DTYPES, held_precision
from shardtune.models.load_result import load_result
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.gptq import E4M3
from shardtune.plan.run_forecast import RunForecast
from shardtune.report.live import RunView
from shardtune.training.environment import describe_environment
from shardtune.training.evaluation import Evaluator
from shardtune.training.meter import peak_memory
from shardtune.training.time_left import TimeLeft

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

    def begin(self) -> Progress:
        """Writes down what is about to run, and evaluates the model as it is."""
        self._require_disk_space()
        environment = describe_environment(self.world, secrets.token_hex(8), self.data)
        self.files.begin(self.job, environment)
        self.evaluate(Progress())
        answers = self._answers()
        if self.world.is_main:
            self.files.write_answers(answers)
        return Progress()

    def resume(self) -> Progress:
        """Goes on after the newest good checkpoint; from the start if there is none yet."""
        found = self._latest()
        if found is None or found.checkpoint is None:
            self.view.say("no checkpoint yet: starting from the first step")
            return self.begin()
        self._require_disk_space()
        require_same_data(self.files, self.data)
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
        self.files.forget_after(manifest.step)
        by = f"written by {manifest.strategy} on {manifest.ranks} ranks"
        self.view.say(f"resuming after step {manifest.step}, from {path} ({by})")
        begun = self.files.read_job()
        self.world.barrier()  # all have read it before it is written
        if begun is not None and is_extended(begun, self.job):
            self.view.say(self._new_length(begun))
            self.files.extend(begun, self.job)
        return manifest.progress

    def _new_length(self, begun: Job) -> str:
        """How long the run is now, and what that means for the rate."""
        train, steps = self.job.train, self.view.steps
        rate = f"the schedule ({train.schedule}) goes on as in a run of {steps} steps"
        if train.schedule_start:
            rate = f"the schedule ({train.schedule}) begins anew after step {train.schedule_start}"
        return f"the run was begun with {length(begun.train)} and has {steps} steps now; {rate}"

    def _latest(self) -> LatestCheckpoint | None:
        """What to go on from. Damaged checkpoints are named, and put where none is looked for."""
        folder = self.files.checkpoints
        if self.world.is_main:
            remove_partial(folder)
        self.world.barrier()
        if not self.world.any(folder.is_dir() and any(folder.iterdir())):
            return None
        found = latest_checkpoint(folder, require_run_id(self.files), self.world)
        for path, why in found.damaged:
            if self.world.is_main:
                quarantine(path)
            self.view.say(f"{path} is damaged: {why}; set aside as {path.name}.damaged", "yellow")
        self.world.barrier()
        return found

    def _require_disk_space(self) -> None:
        """Refuses a disk on which the run's checkpoints and result will not fit."""
        shards, _ = self.engine.shards()
        mine = sum(shard.region.size for shard in shards if shard.key.startswith("weight."))
        trained = sum(map(int, self.world.all_gather(str(mine))))
        rule, save = self.job.train.optimizer, self.job.save
        whole = isinstance(self.job.adapter, NoAdapter)
        need = estimate_disk(
            trained,
            2 if isinstance(rule, AdamW) else int(rule.momentum > 0),
            keep=save.keep,
            saves=-(-self.view.steps // save.every) if save.every else 1,
            result=trained * (self.model.dtype.itemsize if whole else 4),
        )
        require_disk_space(self.files.path, need)

    def log(
        self,
        progress: Progress,
        result: StepResult,
        reading: Reading,
        *,
        epoch: float,
        samples: Sequence[str],
    ) -> None:
        """Shows the step and adds it to the metrics, with a digest of the samples it saw."""
        left = self.clock.after(progress.step, reading.seconds_left)
        reading = replace(reading, seconds_left=left)
        self.view.step(progress.step, result, reading)
        digest = hashlib.sha256("\n".join(samples).encode()).hexdigest()
        step = progress.step
        self.files.jsonl.log(
            StepMetrics.of(step, result, reading, epoch=epoch, samples_sha256=digest)
        )
        if self.job.save.trace:
            self._trace(step, result, digest)

    def note(self, note: LossSpike | NonfiniteGradient) -> None:
        """Something that a person should know about a step, on the screen and in the metrics."""
        self.view.say(f"step {note.step}: {note.fact}", "yellow")
        self.files.jsonl.log(note)

    def _trace(self, step: int, result: StepResult, samples: str) -> None:
        """The step to the bit, on all ranks together."""
        drawn = "".join(self.world.all_gather(digest_rng_state(self.world.device)))
        random = hashlib.sha256(drawn.encode()).hexdigest()
        tensors, _ = self.engine.state()
        if self.world.is_main:
            state = digest_tensors(tensors)
            line = trace_line(step, result, samples=samples, random=random, state=state)
            self.files.jsonl.log_trace(line)

    def evaluate(self, progress: Progress) -> list[EvalResult]:
        """Loss, perplexity and accuracy of each held-out set, now."""
        with self.clock.timed("evaluate"):
            results = self._losses()
        self.view.evaluation(progress.step, results)
        for result in results:
            line = EvaluationMetrics(
                kind="evaluation",
                step=progress.step,
                set=result.name,
                **dict(result.summary()),
            )
            self.files.jsonl.log(line)
        return results

    def _losses(self) -> list[EvalResult]:
        with self.view.phase("evaluating", self.clock.run) as progress:
            return self.evaluator.losses(progress)

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
        if self.job.save.every and self.job.save.background:
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
            self.view.say(f"{error}\n    training goes on; the next is tried when due", "red")

    def finish(self, progress: Progress, probe: MicroBatch) -> RunReport | None:
        """Evaluates, saves, reads back and compares; only then is a run done. Rank 0 has the
        report."""
        results = self.evaluate(progress)
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
                evaluation = self._before_and_after(results)
                card = render_card(self._card_facts(training, evaluation))
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
                ),
                forecast=self._beside_forecast(progress, peak),
            )
            self.files.write_report(report)
        self.world.barrier()
        return report

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

    def _before_and_after(self, results: list[EvalResult]) -> dict[str, BeforeAfter]:
        before = self.files.jsonl.evaluations(step=0)
        return {
            result.name: BeforeAfter(before=before.get(result.name), after=result.summary())
            for result in results
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
