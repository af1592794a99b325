"""The phase clock: waiting is told from work."""

from __future__ import annotations

import time

import pytest

from shardtune.core.host.heartbeat import PHASES, Heartbeat
from shardtune.core.phase_clock import PhaseClock


def burn(seconds: float) -> None:
    """Uses the processor for so long, however long others keep it."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_thread_that_waits_does_not_work() -> None:
    begun = time.monotonic()
    clock = PhaseClock(["backward"], splits=True)
    burn(0.05)
    time.sleep(0.4)
    clock.add("backward", time.monotonic() - begun)
    spent, worked = clock.take()
    assert spent["backward"] >= 0.45
    assert 0.05 <= worked["backward"] <= spent["backward"] - 0.3
    assert clock.take() == ({"backward": 0.0}, {"backward": 0.0})
    clock.close()


def test_where_nobody_waits_for_others_all_of_it_is_work() -> None:
    clock = PhaseClock(["forward"], splits=False)
    clock.add("forward", 2.0)
    clock.add("forward", 1.0)
    assert clock.take() == ({"forward": 3.0}, {"forward": 3.0})


def test_the_heartbeat_tells_it_of_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("shardtune.core.host.heartbeat.time.monotonic", lambda: now)
    heartbeat = Heartbeat()
    heartbeat.clock = PhaseClock(PHASES, splits=False)
    heartbeat.begin(1)
    for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("update", 4.0), ("log", 8.0)):
        now += 0.5 if phase == "forward" else seconds
        heartbeat.enter(phase)  # type: ignore[arg-type]
    spent, _ = heartbeat.clock.take()
    told = {phase: seconds for phase, seconds in spent.items() if seconds}
    assert told == {"data": 0.5, "forward": 2.0, "backward": 4.0, "update": 8.0}


def test_it_costs_next_to_nothing() -> None:
    """A step of 50 ms has about ten phases; 0.5 % of it are 250 microseconds."""
    clock = PhaseClock(["forward"], splits=True)
    begun = time.thread_time()
    for _ in range(1000):
        clock.add("forward", 0.001)
    assert time.thread_time() - begun < 0.025
    clock.close()
