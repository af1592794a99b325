"""What a rank writes is what its launcher reads."""

from __future__ import annotations

import os
import timeit

import pytest

from shardtune.core.host.heartbeat import (
    Beat,
    Heartbeat,
    Heartbeats,
    compiling,
    open_heartbeat,
    own_heartbeat,
)


@pytest.fixture
def heartbeats():  # type: ignore[no-untyped-def]
    found = Heartbeats(3)
    yield found
    found.close()


def test_each_rank_has_a_place_of_its_own(heartbeats: Heartbeats) -> None:
    ranks = [open_heartbeat(os.dup(heartbeats.file), rank, 3) for rank in range(3)]
    ranks[1].begin(7)
    ranks[1].forward(4, 96)
    assert heartbeats.read(0) == heartbeats.read(2) == Beat()
    found = heartbeats.read(1)
    assert (found.beats, found.step, found.phase) == (2, 7, "forward")
    assert (found.rows, found.width) == (4, 96)
    assert str(found) == "step 7 (forward)"


def test_own_time_is_counted_by_phase(heartbeats: Heartbeats) -> None:
    heartbeat = open_heartbeat(os.dup(heartbeats.file), 0, 3)
    heartbeat.begin(1)
    for phase in ("collective", "forward", "backward", "forward", "update"):
        timeit.timeit("sum(range(2000))", number=20)  # takes a moment
        heartbeat.enter(phase)  # type: ignore[arg-type]
    found = heartbeats.read(0)
    assert found.data_seconds > 0
    assert found.forward_seconds > 0
    assert found.data_seconds + found.forward_seconds < found.since


def test_a_compiler_interrupts_a_phase(heartbeats: Heartbeats) -> None:
    heartbeat = open_heartbeat(os.dup(heartbeats.file), 0, 3)
    assert own_heartbeat() is heartbeat
    heartbeat.begin(1)
    heartbeat.forward(4, 96)
    with compiling(), compiling():
        inside = heartbeats.read(0)
    after = heartbeats.read(0)
    assert (inside.phase, after.phase) == ("compile", "forward")
    assert inside.within == after.within == 2  # by which ranks are compared
    assert (after.beats, after.rows, after.width) == (4, 4, 96)


def test_a_beat_costs_next_to_nothing() -> None:
    """A step has some dozen beats and takes milliseconds at the very least."""
    heartbeat = Heartbeat()
    best = min(timeit.repeat(lambda: heartbeat.enter("forward"), number=1000, repeat=20)) / 1000
    assert best < 20e-6
