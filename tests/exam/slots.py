"""Which check may start processes now: the most urgent, so many at a time; and what it cost."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import psutil

LISTED = 12  # of the names that cost most

doing: ContextVar[str] = ContextVar("doing", default="others")
"""The check that this thread is at."""


@contextmanager
def at(name: str) -> Iterator[None]:
    """What is begun here is begun for `name`."""
    before = doing.set(name)
    try:
        yield
    finally:
        doing.reset(before)


@dataclass
class Slots:
    """A check that waits for another's run holds none. By name: `urgency`, of which the smallest
    number goes first, and a name that has none before all others; `width`, slots that it takes."""

    free: int = 1
    urgency: Mapping[str, int] = field(default_factory=dict)
    width: Mapping[str, int] = field(default_factory=dict)
    clock: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds with a slot, and those of processors in it, by name."""
    _waiting: list[tuple[int, int]] = field(default_factory=list)
    _tickets: Iterator[int] = field(default_factory=count)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for a slot, and has it for as long as this lasts."""
        width = self.width.get(doing.get(), 1)
        ticket = (self.urgency.get(doing.get(), -1), next(self._tickets))
        with self._changed:
            heappush(self._waiting, ticket)
            self._changed.wait_for(lambda: self.free >= width and self._waiting[0] == ticket)
            heappop(self._waiting)
            self.free -= width
            self._changed.notify_all()
        begun = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self.clock[doing.get()] += time.monotonic() - begun
                self.free += width
                self._changed.notify_all()

    def charge(self, process: subprocess.Popen[str]) -> None:
        """Adds what a process took that `has_ended`, with the children that it waited for."""
        self.cpu[doing.get()] += sum(psutil.Process(process.pid).cpu_times()[:4])

    def report(self) -> str:
        """The names that cost most, with seconds by the clock and of processors."""
        names = {*self.clock, *self.cpu}
        costly = sorted(names, key=lambda name: -max(self.cpu[name], self.clock[name]))
        told = [f"{name} {self.clock[name]:.0f}/{self.cpu[name]:.0f}" for name in costly]
        more = f" and {len(told) - LISTED} more" if len(told) > LISTED else ""
        return f"seconds by the clock/of processors: {', '.join(told[:LISTED])}{more}"


def has_ended(process: subprocess.Popen[str]) -> bool:
    """Whether it has, without waiting for it: it can still be charged."""
    return process.returncode is not None or bool(
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    )


def of_forked_ranks() -> float:
    """Seconds of processors of the server that forks ranks for checks and tests, and theirs."""
    servers = [each for each in psutil.Process().children() if "forkserver" in str(each.cmdline())]
    return sum(sum(each.cpu_times()[:4]) for each in servers)
