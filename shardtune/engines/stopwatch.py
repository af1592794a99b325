"""Measures how long a rank computes, so that waiting can be seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up the time inside `running`. A GPU's work is timed on the GPU, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

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

    def read(self) -> float:
        """Seconds since it was last read; on a GPU the work must be finished."""
        if self._cuda:
            torch.cuda.synchronize()
        timed = (float(begin.elapsed_time(end)) for begin, end in self._events)
        found = self._seconds + sum(timed) / 1e3
        self._seconds, self._events = 0.0, []
        return found


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
