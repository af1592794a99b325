"""Reads time, throughput and memory off a run."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardtune.core.step import Reading, StepResult
from shardtune.core.units import GIB

THROUGHPUT_WINDOW = 20  # steps over which throughput is averaged for the display


class Meter:
    """A clock that stands still while the run does something other than training."""

    def __init__(self, steps_left: int, device: str) -> None:
        self.steps_left = steps_left
        self.device = device
        self._steps = 0
        self._compiled, self._compiling = compilations(), False
        self._recent: deque[tuple[float, StepResult]] = deque(maxlen=THROUGHPUT_WINDOW)
        self._since = time.perf_counter()
        self._stood = 0.0  # since a step was counted

    def tick(self, results: Sequence[StepResult]) -> list[Reading]:
        """Call when some steps are through, waiting for data included: a reading of each.

        What a device computes on its own was done some time before anybody looks, and its own clock
        tells. Steps without one share the time since the last call equally.
        """
        if not results:
            return []
        now = time.perf_counter()
        share, self._since = (now - self._since) / len(results), now
        compiled, before = compilations(), self._compiled
        here, earlier = compiled != before, self._compiling
        self._compiled, self._compiling = compiled, here
        readings = []
        for number, result in enumerate(results):
            # A flush leaves the last step of a device pending, which may be what was compiled for.
            left = earlier and number == 0 and result.since_last is not None
            readings.append(self._count(self._seconds(result, share), result, here or left))
        return readings

    def _seconds(self, result: StepResult, share: float) -> float:
        """Of one step."""
        stood, self._stood = self._stood, 0.0
        if result.since_last is None:
            return share
        return max(result.since_last - stood, result.busy or 0.0)  # two clocks differ a little

    def _count(self, seconds: float, result: StepResult, compiled: bool) -> Reading:
        """The first step warms caches up, and some have the compiler at work (for other lengths of
        rows, say): minutes beside milliseconds, which would spoil the averages."""
        self.steps_left -= 1
        self._steps += 1
        if self._steps == 1 or compiled:
            return self._reading(seconds, list(self._recent) or [(seconds, result)])
        self._recent.append((seconds, result))
        return self._reading(seconds, list(self._recent))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluating and saving are not training time."""
        begun, before = time.perf_counter(), compilations()
        yield
        stood = time.perf_counter() - begun
        self._since += stood
        self._stood += stood
        self._compiled += compilations() - before

    def _reading(self, seconds: float, recent: list[tuple[float, StepResult]]) -> Reading:
        spent = sum(duration for duration, _ in recent)
        busy = [result.busy for _, result in recent if result.busy is not None]
        return Reading(
            seconds=seconds,
            tokens_per_second=sum(result.tokens for _, result in recent) / spent,
            utilisation=sum(busy) / spent if busy else None,
            seconds_left=self.steps_left * spent / len(recent),
            memory_gib=peak_memory(self.device) / GIB,
        )


def compilations() -> int:
    """How often torch has compiled something in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["stats"]["unique_graphs"]) if compiler else 0


def peak_memory(device: str) -> int:
    """The most bytes that this process held: on its GPU, or in CPU memory where it has none."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
