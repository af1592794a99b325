"""Measures how long a rank computes, so that waiting can be seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardtune.core.runs.step_parts import DeviceParts


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step."""

    busy: float
    since_last: float | None = None
    """From the end of the one before, on a GPU."""
    on_device: DeviceParts | None = None
    """Its parts, on a GPU."""


class ComputeTimer:
    """Adds up the time inside `running`. A GPU's work is timed on the GPU, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any, Any]] = []  # a pass begins, has its data, ends
        self._scheduled: Any = None
        self._received: Any = None
        self._updating: Any = None
        self._ended: Any = None  # the end of the step before

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._cuda:
            begin, end = _event(), _event()
            begin.record()
            yield
            end.record()
            self._events.append((begin, self._received or begin, end))
            self._received = None
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since

    def scheduled(self) -> None:
        """A pipeline's schedule begins: a device that stands still until its last pass is through
        waits for its neighbours."""
        if self._cuda and self._scheduled is None:
            self._scheduled = _event()
            self._scheduled.record()

    def received(self) -> None:
        """The micro-batch is on the device: what comes now is computing."""
        if self._cuda and self._received is None:
            self._received = _event()
            self._received.record()

    def updating(self) -> None:
        """The passes are through, and the ranks have met: the update begins."""
        if self._cuda:
            self._updating = _event()
            self._updating.record()

    def end_step(self) -> Callable[[], StepTimes]:
        """Ends a step and begins anew. What it returns tells the times; of a GPU, when that has
        come to this point."""
        seconds, events, last = self._seconds, self._events, self._ended
        scheduled, updating = self._scheduled, self._updating
        self.restart()
        if not self._cuda:
            return lambda: StepTimes(seconds)
        ended = self._ended = _event()
        ended.record()

        def times() -> StepTimes:
            busy = sum(begin.elapsed_time(end) for begin, _, end in events) / 1e3
            transfer = sum(begin.elapsed_time(there) for begin, there, _ in events) / 1e3
            meeting = optimizer = 0.0
            if updating is not None and events:
                meeting = events[-1][2].elapsed_time(updating) / 1e3
                optimizer = updating.elapsed_time(ended) / 1e3
            if scheduled is not None and events:
                meeting += max(0.0, scheduled.elapsed_time(events[-1][2]) / 1e3 - busy)
            return StepTimes(
                busy,
                last.elapsed_time(ended) / 1e3 if last is not None else None,
                DeviceParts(transfer, busy - transfer, meeting, optimizer),
            )

        return times

    def restart(self) -> None:
        """Begins anew, with nothing before."""
        self._seconds, self._events, self._ended = 0.0, [], None
        self._scheduled = self._received = self._updating = None


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
