"""How long a rank computed and how long a step took, by a clock that somebody else sets."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from shardtune.engine import timer as stopwatch
from shardtune.engine.timer import ComputeTimer, StepTimes


class Clock:
    """Of a GPU: an event takes the time at which it is recorded, in milliseconds."""

    now = 0.0

    def event(self) -> Any:
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.time: float | None = None

    def record(self) -> None:
        self.time = self.clock.now

    def elapsed_time(self, later: Event) -> float:
        assert self.time is not None
        assert later.time is not None
        return later.time - self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(stopwatch, "_event", found.event)
    return found


def step(watch: ComputeTimer, clock: Clock, *passes: float, update: float) -> Any:
    for each in passes:
        with watch.running():
            clock.now += each
        clock.now += 10.0  # between them
    clock.now += update
    return watch.end_step()


def test_a_step_is_from_end_to_end_and_busy_inside(clock: Clock) -> None:
    watch = ComputeTimer(torch.device("cuda"))
    first = step(watch, clock, 1000.0, 500.0, update=80.0)
    clock.now += 2000.0  # waiting for data
    second = step(watch, clock, 3000.0, update=90.0)
    assert second() == StepTimes(3.0, 5.1)  # asked for late, and in any order
    assert first() == StepTimes(1.5, None)


def test_nothing_is_before_a_new_beginning(clock: Clock) -> None:
    watch = ComputeTimer(torch.device("cuda"))
    step(watch, clock, 1000.0, update=1.0)
    with watch.running():
        clock.now += 5000.0
    watch.restart()
    assert step(watch, clock, 2000.0, update=1.0)() == StepTimes(2.0, None)


def test_a_processor_has_ended_when_it_returns() -> None:
    watch = ComputeTimer(torch.device("cpu"))
    for _ in range(2):
        with watch.running():
            time.sleep(0.02)
        time.sleep(0.02)
        lap = watch.end_step()()
        assert 0.02 <= lap.busy < 0.04 + 0.2
        assert lap.since_last is None
