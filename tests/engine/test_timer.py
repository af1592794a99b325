"""How long a rank computed and how long a step took, by a clock that somebody else sets."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from shardtune.core.runs.step_parts import DeviceParts
from shardtune.engine import timer as stopwatch
from shardtune.engine.timer import ComputeTimer


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
    found = second()  # asked for late, and in any order
    assert (found.busy, found.since_last) == (3.0, 5.1)
    assert (first().busy, first().since_last) == (1.5, None)


def test_the_parts_of_a_step_on_a_device(clock: Clock) -> None:
    watch = ComputeTimer(torch.device("cuda"))
    for arrives in (100.0, 300.0):
        with watch.running():
            clock.now += arrives
            watch.received()
            clock.now += 1000.0
    clock.now += 50.0  # the ranks add up their losses
    watch.updating()
    clock.now += 200.0
    times = watch.end_step()
    assert times().on_device == DeviceParts(
        transfer=pytest.approx(0.4),
        compute=pytest.approx(2.0),
        communication=pytest.approx(0.05),
        optimizer=pytest.approx(0.2),
    )


def test_a_pipeline_waits_for_its_neighbours_between_passes(clock: Clock) -> None:
    watch = ComputeTimer(torch.device("cuda"))
    for _ in range(2):  # the second step knows nothing of the first
        clock.now += 40.0  # the host
        watch.scheduled()
        for waits in (700.0, 300.0):
            clock.now += waits
            watch.scheduled()  # a schedule for each block of rows counts from the first
            with watch.running():
                clock.now += 1000.0
        clock.now += 50.0
        watch.updating()
        clock.now += 200.0
        found = watch.end_step()().on_device
        assert found is not None
        assert found.communication == pytest.approx(0.7 + 0.3 + 0.05)
        assert found.compute == pytest.approx(2.0)


def test_nothing_is_before_a_new_beginning(clock: Clock) -> None:
    watch = ComputeTimer(torch.device("cuda"))
    step(watch, clock, 1000.0, update=1.0)
    with watch.running():
        clock.now += 5000.0
    watch.restart()
    found = step(watch, clock, 2000.0, update=1.0)()
    assert (found.busy, found.since_last) == (2.0, None)


def test_a_processor_has_ended_when_it_returns() -> None:
    watch = ComputeTimer(torch.device("cpu"))
    for _ in range(2):
        with watch.running():
            time.sleep(0.02)
        time.sleep(0.02)
        lap = watch.end_step()()
        assert 0.02 <= lap.busy < 0.04 + 0.2
        assert lap.since_last is None
