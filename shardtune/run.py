"""What a run does besides training: begin, resume, evaluate, save, finish.

Every rank calls the same methods in the same order. All of them compute; rank 0 also writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardtune.checkpoint.result import check_result, probe_logits, save_result
from shardtune.checkpoint.rundir import RunDir
from shardtune.checkpoint.state import load_state, newest, save_state
from shardtune.core.engine import Engine
from shardtune.core.progress import Progress
from shardtune.core.step import EvalResult, MicroBatch, Reading, StepResult
from shardtune.evaluate.judge import Judge
from shardtune.forecast import Forecast
from shardtune.job import Job
from shardtune.launch.join import JoinedWorld
from shardtune.measure.environment import describe_environment
from shardtune.measure.meter import GIB, peak_memory
from shardtune.models.load import DTYPES, held_precision, own_dtype
from shardtune.models.result import load_result
from shardtune.report.terminal import RunView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Run:
    """One rank's run."""

    job: Job
    world: JoinedWorld
    engine: Engine
    judge: Judge
    files: RunDir
    view: RunView
    data: Mapping[str, str]
    """The digest of each data set."""
    foretold: Forecast | None = None
    """What was predicted for it; None for a model or a device that the planner doesn't know."""

    def begin(self) -> Progress:
        """Writes down what is about to run, and looks at the model as it is."""
        self.files.begin(self.job, describe_environment(self.world) | {"data": dict(self.data)})
        self.evaluate(Progress())
        answers = self.judge.answers()
        if self.world.is_main:
            self.files.write_answers(answers)
        return Progress()

    def resume(self) -> Progress:
        """Goes on after the newest checkpoint; from the start if there is none yet."""
        checkpoint = newest(self.files.checkpoints)
        if checkpoint is None:
            self.view.say("no checkpoint yet: starting from the first step")
            return self.begin()
        self.files.refuse_other_data(self.data)
        step, tensors, numbers = load_state(checkpoint)
        self.engine.load_state(tensors, numbers)
        self.files.forget_after(step)
        self.view.say(f"resuming after step {step}, from {checkpoint}")
        return Progress(step, int(numbers["tokens"]), numbers["seconds"], numbers["first_loss"])

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
        self.view.step(progress.step, result, reading)
        digest = hashlib.sha256("\n".join(samples).encode()).hexdigest()
        facts = asdict(result) | asdict(reading) | {"epoch": epoch, "samples_sha256": digest}
        self.files.log({"kind": "step", "step": progress.step, **facts})

    def evaluate(self, progress: Progress) -> list[EvalResult]:
        """Loss, perplexity and accuracy of each held-out set, now."""
        results = self.judge.losses()
        self.view.evaluation(progress.step, results)
        for result in results:
            facts = {"set": result.name, **result.summary()}
            self.files.log({"kind": "evaluation", "step": progress.step, **facts})
        return results

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint that `resume` goes on from."""
        tensors, numbers = self.engine.state()
        if self.world.is_main:
            numbers |= {"tokens": progress.tokens, "seconds": progress.seconds}
            numbers |= {"first_loss": progress.first_loss or 0.0}
            keep = self.job.save.keep
            save_state(self.files.checkpoints, progress.step, tensors, numbers, keep=keep)
        self.world.wait()

    def finish(self, progress: Progress, probe: MicroBatch) -> dict[str, Any]:
        """Evaluates, saves, reads back and compares; only then is a run done."""
        results = self.evaluate(progress)
        peak = self.world.most(peak_memory(self.world.device)) / GIB
        # What needs every rank comes first: a model that is spread answers only together.
        answers = self.judge.answers()
        trained = self.engine.trained_weights()
        logits = probe_logits(self.engine.module(), probe, self.world.device)
        report: dict[str, Any] = {}
        if self.world.is_main:
            self.view.say("saving the result, and reading it back")
            difference = self._save_result(trained, logits, probe)
            report = {
                "finished": not progress.stopped,
                "directory": str(self.files.path),
                "ranks": self.world.size,
                "training": {**asdict(progress), "peak_memory_gib": peak},
                "evaluation": self._before_and_after(results),
                "samples": self._samples(answers),
                "result": {
                    "path": str(self.files.result),
                    "kind": self.job.adapter.type,
                    "largest_difference": difference,
                },
                "forecast": self._beside_forecast(progress, peak),
            }
            self.files.write_report(report)
        self.world.wait()
        return report

    def _beside_forecast(self, progress: Progress, peak_gib: float) -> dict[str, Any] | None:
        """Predicted beside measured; of a processor we can measure only what the engine holds."""
        if self.foretold is None:
            return None
        on_gpu = self.world.device != "cpu"
        return self.foretold.beside(
            self.engine.held(),
            peak=peak_gib * GIB if on_gpu else None,
            tokens_per_second=progress.tokens_per_second if on_gpu else None,
        )

    def _before_and_after(self, results: list[EvalResult]) -> dict[str, Any]:
        before = self.files.evaluations(step=0)
        return {
            result.name: {"before": before.get(result.name), "after": result.summary()}
            for result in results
        }

    def _samples(self, after: Sequence[str]) -> list[dict[str, str]]:
        # A resumed run may show more or fewer samples than the one that began.
        before = (self.files.read_answers() + [""] * len(after))[: len(after)]
        return [
            {**question, "before": old, "after": new}
            for question, old, new in zip(self.judge.questions(), before, after, strict=True)
        ]

    def _save_result(
        self, trained: Mapping[str, Tensor], logits: Tensor, probe: MicroBatch
    ) -> float:
        job, target, judge = self.job, self.files.result, self.judge
        trained = {name: weight.cpu() for name, weight in trained.items()}
        written = save_result(
            self.engine.module(),
            trained,
            judge.tokenizer,
            judge.stops,
            target,
            dtype=own_dtype(job.model),
        )
        reloaded = load_result(str(target), job.model, held_precision(job.adapter, job.train))
        computed = DTYPES[job.train.precision]
        return check_result(reloaded, trained, logits, probe, written=written, computed=computed)
