"""The meter: a clock that stands still while the run does something else."""

from __future__ import annotations

import time
from dataclasses import replace

import psutil
import pytest
import torch

from shardtune.core.step import Reading, StepResult
from shardtune.core.units import GIB
from shardtune.training.meter import Meter, peak_memory

PAUSE = 0.3  # long beside everything else that happens here


def result(tokens: int) -> StepResult:
    return StepResult(1.0, 1.0, 1e-3, tokens, tokens)


def tick(meter: Meter, result: StepResult) -> Reading:
    (reading,) = meter.tick([result])
    return reading


def test_a_step_takes_as_long_as_it_takes() -> None:
    meter = Meter(2, "cpu")
    time.sleep(0.05)
    reading = tick(meter, result(100))
    assert 0.05 <= reading.seconds < 0.05 + PAUSE
    assert reading.tokens_per_second == pytest.approx(100 / reading.seconds)
    assert reading.seconds_left == pytest.approx(reading.seconds)  # one more like it


def test_it_says_which_share_of_the_time_ranks_computed() -> None:
    meter = Meter(3, "cpu")
    assert tick(meter, result(10)).utilisation is None  # an engine that doesn't say
    for _ in range(2):
        time.sleep(0.1)
        reading = tick(meter, replace(result(10), busy=0.05))
    assert 0.3 < (reading.utilisation or 0) <= 0.5  # half of a tenth of a second, or a bit less


def test_paused_time_does_not_count() -> None:
    meter = Meter(3, "cpu")
    tick(meter, result(10))
    with meter.paused():
        time.sleep(PAUSE)
    time.sleep(0.05)
    assert 0.05 <= tick(meter, result(10)).seconds < PAUSE


def test_time_that_is_not_paused_does() -> None:
    meter = Meter(3, "cpu")
    tick(meter, result(10))
    time.sleep(PAUSE)  # waiting for data, say
    assert tick(meter, result(10)).seconds >= PAUSE


def test_the_first_step_does_not_spoil_the_averages() -> None:
    meter = Meter(3, "cpu")
    time.sleep(PAUSE)  # it warms caches up
    tick(meter, result(1000))
    second = tick(meter, result(1000))
    assert second.tokens_per_second == pytest.approx(1000 / second.seconds)
    third = tick(meter, result(500))
    assert third.tokens_per_second == pytest.approx(1500 / (second.seconds + third.seconds))
    assert third.seconds_left == 0


def test_nor_does_a_step_that_compiles() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    quick = torch.compile(double, backend="eager", dynamic=False)
    meter = Meter(4, "cpu")
    tick(meter, result(10))
    second = tick(meter, result(1000))
    quick(torch.ones(3))
    time.sleep(PAUSE)
    third = tick(meter, result(1000))
    assert third.seconds >= PAUSE
    assert third.tokens_per_second == second.tokens_per_second
    with meter.paused():
        quick(torch.ones(4))  # an evaluation, say
    quick(torch.ones(3))  # the same shape as before: nothing to compile
    fourth = tick(meter, result(500))
    assert fourth.tokens_per_second == pytest.approx(1500 / (second.seconds + fourth.seconds))


def test_the_speed_is_that_of_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("shardtune.training.meter.time.perf_counter", lambda: now)
    meter = Meter(100, "cpu")
    for duration in [1.0] * 10 + [2.0] * 20:
        now += duration
        reading = tick(meter, result(100))
    assert reading.tokens_per_second == 50.0  # 20 steps of 100 tokens in 40 s
    assert reading.seconds_left == 140.0  # 70 more of 2 s


def test_a_devices_own_clock_counts_however_late_one_looks() -> None:
    """A look comes when the next step is under way: by the program's clock the first step after a
    pause would be too long, and the last ones before the next too short."""
    meter = Meter(5, "cpu")
    late = replace(result(100), busy=0.2, since_last=0.25)
    time.sleep(0.05)
    first = tick(meter, replace(late, since_last=None))  # there was none before it
    assert 0.05 <= first.seconds < 1
    time.sleep(PAUSE)
    assert tick(meter, late).seconds == 0.25
    with meter.paused():
        time.sleep(PAUSE)
    third, fourth = meter.tick([replace(late, since_last=0.25 + PAUSE), late])
    assert 0.2 <= third.seconds <= 0.25
    assert fourth.seconds == 0.25
    assert fourth.tokens_per_second == pytest.approx(300 / (0.5 + third.seconds))


def test_and_the_compiler_spoils_a_device_step_that_is_read_later() -> None:
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    quick = torch.compile(triple, backend="eager", dynamic=False)
    meter, late = Meter(5, "cpu"), replace(result(100), busy=0.2, since_last=0.25)
    tick(meter, result(100))
    second = tick(meter, late)
    quick(torch.ones(3))  # for the fourth, before the third is looked at
    tick(meter, late)
    fourth = tick(meter, replace(late, since_last=60.0))
    assert fourth.seconds == 60.0
    assert fourth.tokens_per_second == second.tokens_per_second
    assert tick(meter, late).tokens_per_second == pytest.approx(400)


def test_but_it_spoils_none_of_those_behind_it() -> None:
    def fourfold(x: torch.Tensor) -> torch.Tensor:
        return x * 4

    quick = torch.compile(fourfold, backend="eager", dynamic=False)
    meter, late = Meter(5, "cpu"), replace(result(100), busy=0.2, since_last=0.25)
    quick(torch.ones(3))
    tick(meter, result(100))
    *_, last = meter.tick([replace(late, since_last=60.0), late, replace(late, since_last=0.5)])
    assert last.tokens_per_second == pytest.approx(200 / 0.75)


@pytest.mark.slow
def test_the_peak_of_memory_is_what_this_process_held() -> None:
    before = peak_memory("cpu")
    more = 256 << 20  # much beside the tens of MiB by which the two ways to ask differ
    held = b"x" * (before - psutil.Process().memory_info().rss + more)  # beyond what it ever had
    after = peak_memory("cpu")
    assert before + more / 2 < after < before + 2 * more
    del held
    assert peak_memory("cpu") >= after, "a peak doesn't fall"
    assert tick(Meter(1, "cpu"), result(1)).memory_gib == pytest.approx(after / GIB, rel=0.1)
