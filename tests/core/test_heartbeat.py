"""What a rank writes is what its launcher reads."""

from __future__ import annotations

import os
import timeit

import pytest

from shardtune.core.heartbeat import Beat, Pulse, Pulses, compiling, open_pulse, own_pulse


@pytest.fixture
def pulses():  # type: ignore[no-untyped-def]
    found = Pulses(3)
    yield found
    found.close()


def test_each_rank_has_a_place_of_its_own(pulses: Pulses) -> None:
    ranks = [open_pulse(os.dup(pulses.file), rank, 3) for rank in range(3)]
    ranks[1].begin(7)
    ranks[1].forward(4, 96)
    assert pulses.read(0) == pulses.read(2) == Beat()
    found = pulses.read(1)
    assert (found.beats, found.step, found.phase) == (2, 7, "forward")
    assert (found.rows, found.width) == (4, 96)
    assert str(found) == "step 7 (forward)"


def test_own_time_is_counted_by_phase(pulses: Pulses) -> None:
    pulse = open_pulse(os.dup(pulses.file), 0, 3)
    pulse.begin(1)
    for phase in ("collective", "forward", "backward", "forward", "update"):
        timeit.timeit("sum(range(2000))", number=20)  # takes a moment
        pulse.enter(phase)  # type: ignore[arg-type]
    found = pulses.read(0)
    assert found.data_seconds > 0
    assert found.forward_seconds > 0
    assert found.data_seconds + found.forward_seconds < found.since


def test_a_compiler_interrupts_a_phase(pulses: Pulses) -> None:
    pulse = open_pulse(os.dup(pulses.file), 0, 3)
    assert own_pulse() is pulse
    pulse.begin(1)
    pulse.forward(4, 96)
    with compiling(), compiling():
        inside = pulses.read(0)
    after = pulses.read(0)
    assert (inside.phase, after.phase) == ("compile", "forward")
    assert inside.within == after.within == 2  # by which ranks are compared
    assert (after.beats, after.rows, after.width) == (4, 4, 96)


def test_a_beat_costs_next_to_nothing() -> None:
    """A step has some dozen beats and takes milliseconds at the very least."""
    pulse = Pulse()
    best = min(timeit.repeat(lambda: pulse.enter("forward"), number=1000, repeat=20)) / 1000
    assert best < 20e-6
