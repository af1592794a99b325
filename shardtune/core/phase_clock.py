"""The phase clock: how long a rank has been in each phase, and how much of that it was at work."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress


class ThreadClock:
    """The time in which the thread that made it was at work, or ready to: on a processor, or in the
    run queue because others had it. Of the rest it waited: for a collective, a disk, a lock."""

    def __init__(self) -> None:
        self._queue: int | None = None
        with suppress(OSError):  # Linux's account of a thread; elsewhere queues aren't counted
            self._queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float:
        """So far."""
        return time.thread_time() + self.queued()

    def queued(self) -> float:
        """Of these, in the run queue."""
        if self._queue is None:
            return 0.0
        # on a processor, in the run queue: nanoseconds
        return int(os.pread(self._queue, 80, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._queue is not None:
            os.close(self._queue)
            self._queue = None


class PhaseClock:
    """Adds up seconds by phase. A thread that waits for a collective uses no processor, so its own
    clock tells waiting from work. Costs 2 microseconds a phase."""

    def __init__(self, phases: Iterable[str], *, splits: bool) -> None:
        """`splits`: whether work and waiting are to be told apart, in the thread that calls."""
        self.spent = dict.fromkeys(phases, 0.0)
        """All seconds of a phase."""
        self.worked = dict(self.spent)
        """Of these, at work or ready to."""
        self._thread = ThreadClock() if splits else None
        self._own = self._thread.seconds() if self._thread is not None else 0.0
        self._queued = self._thread.queued() if self._thread is not None else 0.0

    def add(self, phase: str, seconds: float) -> None:
        """A phase that began when the last one was added has ended now."""
        worked = seconds
        if self._thread is not None:
            own = self._thread.seconds()
            worked = min(seconds, max(0.0, own - self._own))
            self._own = own
        self.spent[phase] += seconds
        self.worked[phase] += worked

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """`spent` and `worked` since the last time, and begins anew."""
        found = self.spent, self.worked
        self.spent = dict.fromkeys(self.spent, 0.0)
        self.worked = dict(self.spent)
        return found

    def take_queued(self) -> float:
        """Seconds in the run queue since the last time: others had the processor."""
        if self._thread is None:
            return 0.0
        before, self._queued = self._queued, self._thread.queued()
        return self._queued - before

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
