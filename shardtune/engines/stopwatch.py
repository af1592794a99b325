"""Measures how long a rank computes, so that waiting can be seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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

    def lap(self) -> Callable[[], float]:
        """Begins anew. What it returns tells the seconds until now; of a GPU, when that has
        finished the work."""
        seconds, events = self._seconds, self._events
        self._seconds, self._events = 0.0, []
        return lambda: seconds + sum(begin.elapsed_time(end) for begin, end in events) / 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
