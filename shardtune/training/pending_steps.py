"""Pending steps: taken, and not yet read from the device; `flush` is the sync point."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import TracebackType

from shardtune.core.host.stop_request import StopRequest
from shardtune.core.progress import Progress
from shardtune.core.runs.step_parts import StepParts
from shardtune.core.step import LateResult, MicroBatch, Reading, StepResult
from shardtune.data.loader import Loader
from shardtune.training.health import Health
from shardtune.training.meter import Meter
from shardtune.training.part_recorder import PartRecorder
from shardtune.training.run import Run


@dataclass
class PendingSteps:
    """Results of steps, which a device may still be computing. Every rank flushes at the same time.
    What is left when something fails is logged on the way out."""

    run: Run
    data: Loader
    meter: Meter
    progress: Progress
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._health = Health(self.run)
        self._parts = PartRecorder(self.run.job, self.run.world)

    def add(self, result: StepResult, microbatches: Sequence[MicroBatch]) -> None:
        self.results.append(result)
        self._parts.count(microbatches)

    def __enter__(self) -> PendingSteps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Logs what is done by now, in order, up to the first step that isn't: it may never be. No
        rank can be asked any more, so nothing is checked, and nothing traced."""
        self._parts.close()
        if not isinstance(error, Exception) or self.run.job.save.trace:
            return
        with suppress(Exception):  # the device may be what failed
            done = [each.read() for each in takewhile(lambda each: each.is_done(), self.results)]
            for result, reading in zip(done, self.meter.tick(done), strict=True):
                self._log(result, reading, StopRequest.NONE)

    def flush(self, stop: StopRequest, *, whole: bool) -> Progress:
        """Sync point: waits for these steps, logs and checks them. `stop` came with the last.

        A step that a device has only just been given is left to the next flush, unless this is a
        `whole` one: the device computes it while the one before is read.
        """
        behind = not whole and isinstance(self.results[-1], LateResult)
        ready = len(self.results) - behind
        self.results[:ready], parts = self._read(self.results[:ready])
        self.run.world.heartbeat.enter("log")
        for reading in self.meter.tick(self.results[:ready]):
            step, result = self.progress.step, self.results[0]
            ready -= 1
            if ready:
                samples = self._log(result, reading, StopRequest.NONE)
            else:
                samples = self._log(result, reading, stop, parts)
            self._health.check(self.progress, result, self._microbatches(step, result), samples)
        return self.progress

    def _log(
        self,
        result: StepResult,
        reading: Reading,
        stop: StopRequest,
        parts: StepParts | None = None,
    ) -> Sequence[str]:
        """The first of them, and the samples of it."""
        step = self.progress.step
        samples, epoch = self.data.samples(step), self.data.epoch(step + 1)
        self.progress = self.progress.after(result, reading, stop)
        del self.results[0]
        self.run.log.step(self.progress, result, reading, epoch=epoch, samples=samples, parts=parts)
        return samples

    def _read(self, results: list[StepResult]) -> tuple[list[StepResult], StepParts | None]:
        """The figures of all; a step that has come to its end is a sign of life. And where the time
        went on each rank, when it is time for that."""
        if not results:  # nor on any other rank; the time so far belongs to the next step
            return [], None
        world, found = self.run.world, []
        for result in results:
            world.heartbeat.enter("update")
            found.append(result.read())
        busy = [result.busy for result in found if result.busy is not None]
        world.heartbeat.enter("collective")
        mine = self._parts.take(found, self.data.loaded)
        told = world.gather([*mine, *busy])
        parts = self._parts.put_together([each[: len(mine)] for each in told], len(found))
        if busy:
            means = (sum(each) / world.size for each in zip(*told, strict=True))
            busy_means = list(means)[len(mine) :]
            pairs = zip(found, busy_means, strict=True)
            found = [replace(result, busy=mean) for result, mean in pairs]
        return found, parts

    def _microbatches(self, step: int, result: StepResult) -> list[MicroBatch]:
        """Those of a step that went wrong: the loader makes any step again."""
        return [] if result.applied else list(next(self.data.steps(step, step + 1)))
