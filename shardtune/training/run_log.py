"""What a run shows and keeps of each step: the screen, `metrics.jsonl`, the trace, and warnings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardtune.checkpoint.digest import digest_rng_state, digest_tensors, trace_line
from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import Job
from shardtune.core.engine import Engine
from shardtune.core.progress import Progress
from shardtune.core.runs.curve_warnings import CurveWatch
from shardtune.core.runs.metrics import (
    CurveWarning,
    LossSpike,
    MetricsLine,
    NonfiniteGradient,
    StepMetrics,
)
from shardtune.core.runs.metrics_log import follow
from shardtune.core.runs.step_parts import StepParts
from shardtune.core.step import Reading, StepResult
from shardtune.launch.process_group import JoinedWorld
from shardtune.report.live import RunView
from shardtune.training.time_left import TimeLeft


@dataclass(frozen=True)
class RunLog:
    """One rank's log. Every rank calls it; rank 0 writes."""

    job: Job
    world: JoinedWorld
    engine: Engine
    files: RunDir
    view: RunView
    clock: TimeLeft
    watch: CurveWatch = field(default_factory=CurveWatch)

    def step(
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
        self.keep(
            StepMetrics.of(step, result, reading, epoch=epoch, samples_sha256=digest, parts=parts)
        )
        if self.job.save.trace:
            self._trace(step, result, digest)

    def note(self, note: LossSpike | NonfiniteGradient | CurveWarning) -> None:
        """Something that a person should know about a step, on the screen and in the metrics."""
        self.view.warn(f"step {note.step}: {note.fact}")
        self.keep(note)

    def keep(self, line: MetricsLine) -> None:
        """Adds a line to the metrics. What the curves say is wrong with it is said, once."""
        self.files.jsonl.log(line)
        for warning in self.watch.see(line) if self.world.is_main else ():
            self.note(warning)

    def recall(self) -> None:
        """Shows the run's past to the watch: what was said before isn't said again."""
        if not self.world.is_main:  # who says what the curves show
            return
        found = follow(self.files.path)
        while found.lines:
            for line in found.lines:
                self.watch.see(line)
            found = follow(self.files.path, found.position)

    def _trace(self, step: int, result: StepResult, samples: str) -> None:
        """The step to the bit, on all ranks together."""
        drawn = "".join(self.world.all_gather(digest_rng_state(self.world.device)))
        random = hashlib.sha256(drawn.encode()).hexdigest()
        tensors, _ = self.engine.state()
        if self.world.is_main:
            state = digest_tensors(tensors)
            line = trace_line(step, result, samples=samples, random=random, state=state)
            self.files.jsonl.log_trace(line)
