"""The watcher, with heartbeats that a test writes and a clock that it turns."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardtune.core.host.heartbeat import Heartbeat, Heartbeats, Phase, open_heartbeat
from shardtune.launch import ray_watch
from shardtune.launch import watchdog as watch
from shardtune.launch.ray_watch import RayWatch
from shardtune.launch.watchdog import LONGEST_PAUSE, HungRank, Watchdog

ALIVE = {0: 101, 1: 102, 2: 103}
CYCLE: tuple[Phase, ...] = ("collective", "forward", "backward", "collective", "update", "save")


class Scene:
    """Three ranks in lockstep, seen ten times a second."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self.ranks = [open_heartbeat(os.dup(heartbeats.file), rank, 3) for rank in range(3)]
        self.now = 0.0
        self.watcher = Watchdog(heartbeats, 4.0, self.now)

    def look(self, seconds: float) -> HungRank | None:
        """Time passes; returns the first alarm in it."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += 0.1
            if (found := self.watcher.hung(ALIVE, self.now)) is not None:
                return found
        return None

    def step(self, number: int, seconds: float, *, but: int | None = None) -> HungRank | None:
        """A step; the rank `but` begins it and comes no further."""
        for rank, heartbeat in enumerate(self.ranks):
            heartbeat.begin(number)
            if rank != but:
                for phase in CYCLE:
                    heartbeat.enter(phase)
        return self.look(seconds)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What the kernel says about the processes, which there are none of."""
    found = dict.fromkeys(ALIVE.values(), "S")
    monkeypatch.setattr(watch, "process_state", lambda pid: found[pid])
    monkeypatch.setattr(watch, "cpu_seconds", lambda pid: 0.0)
    monkeypatch.setattr(watch, "runqueue_seconds", lambda pid: 0.0)
    return found


@pytest.fixture
def scene(states: dict[int, str]) -> Iterator[Scene]:
    heartbeats = Heartbeats(3)
    yield Scene(heartbeats)
    heartbeats.close()


def enter(scene: Scene, phase: Phase) -> None:
    for heartbeat in scene.ranks:
        heartbeat.enter(phase)


def test_the_rank_that_is_behind_is_hung(scene: Scene) -> None:
    for step in range(1, 6):
        assert scene.step(step, 0.2) is None
    found = scene.step(6, 10.0, but=1)
    assert found is not None
    assert (found.rank, found.beat.step, found.beat.phase) == (1, 6, "data")
    assert 4.0 < found.seconds < 4.3


def test_long_steps_get_longer(scene: Scene) -> None:
    for step in range(1, 6):
        assert scene.step(step, 20.0) is None
    assert scene.step(6, 49.0, but=1) is None
    assert scene.look(2.0) is not None


@pytest.mark.parametrize("phase", ["start", "evaluate", "save", "finish"])
def test_what_takes_its_time_is_no_alarm(scene: Scene, phase: Phase) -> None:
    for step in range(1, 6):
        scene.step(step, 0.2)
    enter(scene, phase)
    assert scene.look(LONGEST_PAUSE - 1) is None
    assert scene.look(2.0) is not None


def test_nor_is_a_compiler_in_any_step(scene: Scene) -> None:
    """One rank has rows of a length that is new; the others wait for it."""
    for step in range(1, 6):
        assert scene.step(step, 0.2) is None
    for heartbeat in scene.ranks:
        heartbeat.begin(6)
        heartbeat.enter("forward")
    slow, *others = scene.ranks
    slow.compile_began()
    for heartbeat in others:
        heartbeat.enter("collective")
    assert scene.look(600.0) is None
    slow.compile_ended()
    assert scene.look(3.5) is None
    found = scene.look(1.0)
    assert found is not None
    assert (found.rank, found.beat.phase) == (0, "forward")


def test_nor_is_the_first_step(scene: Scene) -> None:
    assert scene.look(600.0) is None
    assert scene.step(4, 600.0, but=1) is None  # a resumed run's first is any


def test_a_stopped_rank_is_found_anywhere(scene: Scene, states: dict[int, str]) -> None:
    enter(scene, "evaluate")
    scene.look(0.1)
    states[103] = "T"
    found = scene.look(10.0)
    assert found is not None
    assert (found.rank, found.stopped) == (2, True)
    assert found.seconds < 2.3


def test_ranks_that_are_all_as_far_are_told_apart_by_what_they_compute(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        scene.step(step, 0.2)
    enter(scene, "backward")
    monkeypatch.setattr(watch, "cpu_seconds", lambda pid: scene.now if pid == 102 else 0.0)
    found = scene.look(10.0)
    assert found is not None
    assert found.rank == 1


def test_if_none_computes_none_is_blamed(scene: Scene) -> None:
    for step in range(1, 6):
        scene.step(step, 0.2)
    enter(scene, "collective")
    found = scene.look(10.0)
    assert found is not None
    assert found.rank is None


def test_a_rank_that_gets_no_processor_is_not_hung(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        scene.step(step, 0.2)
    monkeypatch.setattr(watch, "runqueue_seconds", lambda pid: 0.75 * scene.now)
    assert scene.step(6, 12.0, but=1) is None  # of 12 seconds it had a processor for 4
    found = scene.look(4.0)
    assert found is not None
    assert found.rank == 1


def test_who_waits_for_another_is_not_to_blame(scene: Scene) -> None:
    """In a pipeline the ranks do different things in a step, and beat differently often."""
    for step in range(1, 6):
        scene.step(step, 0.2)
    for rank, heartbeat in enumerate(scene.ranks):
        heartbeat.begin(6)
        for phase in CYCLE[: 3 - rank]:
            heartbeat.enter(phase)
        heartbeat.enter("forward" if rank == 0 else "collective")
    found = scene.look(5.0)
    assert found is not None
    assert found.rank == 0


def test_a_rank_that_moves_is_slow_and_not_hung(scene: Scene) -> None:
    for step in range(1, 6):
        scene.step(step, 0.2)
    scene.step(6, 0.2, but=1)
    for heartbeat in (scene.ranks[0], scene.ranks[2]):
        heartbeat.begin(7)
        heartbeat.enter("collective")
    for _ in range(10):  # micro-batches of two seconds; the others wait for 20
        scene.ranks[1].enter("forward")
        assert scene.look(2.0) is None


def test_a_watcher_that_slept_itself_forgives(scene: Scene) -> None:
    for step in range(1, 6):
        scene.step(step, 0.2)
    scene.now += 60.0  # it was stopped, and the ranks may have been as well
    assert scene.look(3.0) is None


@pytest.mark.slow
def test_no_false_alarm_in_10000_steps(scene: Scene) -> None:
    draw = random.Random(1)
    for step in range(1, 10_001):
        pause = 100.0 if step % 500 == 0 else 0.0
        assert scene.step(step, draw.choice([0.1, 0.2, 0.3])) is None
        if pause:
            enter(scene, draw.choice(["evaluate", "save"]))
            assert scene.look(pause) is None
    assert scene.watcher.slow() is None


def slow_down(heartbeat: Heartbeat, phase: str, seconds: float) -> None:
    """As if the phase had taken so long."""
    name = "_data" if phase == "data" else "_forward"
    setattr(heartbeat, name, getattr(heartbeat, name) + seconds)


@pytest.mark.parametrize("phase", ["data", "forward"])
def test_a_slow_rank_is_told_once_with_its_phase(scene: Scene, phase: str) -> None:
    told = []
    for step in range(1, 40):
        for rank, heartbeat in enumerate(scene.ranks):
            slow_down(heartbeat, phase, 0.2 if rank == 2 else 0.1)
        scene.step(step, 0.3)
        if (found := scene.watcher.slow()) is not None:
            told.append(found)
    assert [(found.rank, found.phase) for found in told] == [(2, phase)]
    assert told[0].seconds == pytest.approx(0.2, rel=0.05)
    assert told[0].others == pytest.approx(0.1, rel=0.05)


def test_a_difference_that_costs_no_time_is_not_worth_a_word(scene: Scene) -> None:
    for step in range(1, 40):
        slow_down(scene.ranks[2], "data", 0.02)
        scene.step(step, 0.3)
        assert scene.watcher.slow() is None


def test_workers_of_ray_that_prepare_the_data_are_not_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one prepares for twice as long as any pause may be."""
    heartbeats = Heartbeats(2)
    ranks = [open_heartbeat(os.dup(heartbeats.file), rank, 2) for rank in range(2)]
    now, looks = 0.0, 0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    def look(ray: RayWatch) -> dict[int, int]:
        """Shows the heartbeats; the second worker's first comes late, and is followed by none."""
        nonlocal now, looks
        now, looks = now + 0.5, looks + 1
        if looks == 1:
            ranks[0].enter("start")
        elif looks == prepared:
            assert ray.hung is None
            ranks[1].enter("start")
        for rank in range(2):
            (tmp_path / f"beat-{rank}").write_bytes(heartbeats.slots(range(rank, rank + 1)))
        return original(ray)

    prepared, original = 12, RayWatch._look
    monkeypatch.setattr(watch, "LONGEST_PAUSE", 3.0)
    monkeypatch.setattr(ray_watch, "time", Clock)
    monkeypatch.setattr(ray_watch, "PERIOD", 0.0)
    monkeypatch.setattr(RayWatch, "_look", look)
    ray = RayWatch(tmp_path, 2, 4.0)
    ray._run()
    assert ray.hung is not None
    assert now - prepared / 2 > 3.0
    heartbeats.close()
