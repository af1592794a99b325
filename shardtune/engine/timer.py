"""Measures how long a rank computes, so that waiting can be seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step."""

    busy: float
    since_last: float | None = None
    """From the end of the one before, on a GPU."""


class ComputeTimer:
    """Adds up the time inside `running`. A GPU's work is timed on the GPU, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._ended: Any = None  # the end of the step before

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._cuda:
            begin, end = _event(), _event()
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since

    def end_step(self) -> Callable[[], StepTimes]:
        """Ends a step and begins anew. What it returns tells the times; of a GPU, when that has
        come to this point."""
        seconds, events, last = self._seconds, self._events, self._ended
        self.restart()
        if not self._cuda:
            return lambda: StepTimes(seconds)
        ended = self._ended = _event()
        ended.record()

        def times() -> StepTimes:
            busy = sum(begin.elapsed_time(end) for begin, end in events) / 1e3
            return StepTimes(busy, last.elapsed_time(ended) / 1e3 if last is not None else None)

        return times

    def restart(self) -> None:
        """Begins anew, with nothing before."""
        self._seconds, self._events, self._ended = 0.0, [], None


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
