"""Steps that were taken and that nobody has looked at yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardtune.core.progress import Progress
from shardtune.core.step import LateResult, MicroBatch, StepResult
from shardtune.core.wish import Wish
from shardtune.data.loader import Loader
from shardtune.health import Health
from shardtune.measure.meter import Meter
from shardtune.run import Run


@dataclass
class Unread:
    """Their results, which a device may still be computing. Every rank looks at the same time."""

    run: Run
    data: Loader
    meter: Meter
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._health = Health(self.run)

    def add(self, result: StepResult) -> None:
        self.results.append(result)

    def look(self, progress: Progress, wish: Wish, *, whole: bool) -> Progress:
        """Waits for these steps, logs and checks one after another. `wish` came with the last.

        A step that a device has only just been given is left to the next look, unless this is a
        `whole` one: the device computes it while the one before is read.
        """
        behind = not whole and isinstance(self.results[-1], LateResult)
        ready = len(self.results) - behind
        if not ready:
            return progress
        results, self.results = self._read(self.results[:ready]), self.results[ready:]
        wishes = [Wish.NONE] * (len(results) - 1) + [wish]
        for result, reading, wished in zip(results, self.meter.tick(results), wishes, strict=True):
            step = progress.step
            samples, epoch = self.data.samples(step), self.data.epoch(step + 1)
            progress = progress.after(result, reading, wished)
            self.run.log(progress, result, reading, epoch=epoch, samples=samples)
            self._health.check(progress, result, self._microbatches(step, result), samples)
        return progress

    def _read(self, results: list[StepResult]) -> list[StepResult]:
        """The figures of all; a step that has come to its end is a sign of life."""
        world, found = self.run.world, []
        for result in results:
            world.pulse.enter("update")
            found.append(result.read())
        busy = [result.busy for result in found if result.busy is not None]
        if not busy:
            return found
        world.pulse.enter("collective")
        means = world.mean(busy)
        return [replace(result, busy=mean) for result, mean in zip(found, means, strict=True)]

    def _microbatches(self, step: int, result: StepResult) -> list[MicroBatch]:
        """Those of a step that went wrong: the loader makes any step again."""
        return [] if result.applied else list(next(self.data.steps(step, step + 1)))
