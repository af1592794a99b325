"""A profile that a run takes of itself: torch's profiler on each rank, a few steps after warm-up.

Left in the run directory's `profile/`, for each rank:
  rank-0.trace.json.gz    the Chrome trace (chrome://tracing, ui.perfetto.dev)
  rank-0.json             what we read from it (`core/runs/rank_profile.py`)
  rank-0.memory.pickle    the allocator's history, of a GPU (pytorch.org/memory_viz)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shardtune.core.files.atomic_write import atomic_write
from shardtune.core.runs.chrome_trace import add_up, read_trace
from shardtune.core.world import World

WARM_UP_STEPS = 3
"""Steps before it begins: the first ones compile, allocate and fill caches."""
MEMORY_EVENTS = 100_000


class StepProfiler:
    """Profiles `steps` steps of a run that has `left` before it."""

    def __init__(
        self, folder: Path, world: World, steps: int, left: int, say: Callable[[str], None]
    ) -> None:
        self._folder, self._world, self._say = folder, world, say
        self._steps = min(steps, max(1, left - 1))
        self._wait = max(1, min(WARM_UP_STEPS, left - self._steps)) if left > 1 else 0
        self._profile: profile | None = None
        self._taken, self._begun = 0, 0.0
        self._ended = False

    def after_step(self) -> None:
        """Call after each step: the profile begins and ends between two of them."""
        if self._wait:
            self._wait -= 1
            if self._wait == 0:
                self._start()
        elif self._profile is not None:
            self._taken += 1
            if self._taken == self._steps:
                self.stop()

    @property
    def _on_gpu(self) -> bool:
        return self._world.device != "cpu"

    def _start(self) -> None:
        """Begins; a profiler that can't costs no run."""
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - whatever it is, it's the profiler's
            self._profile, self._ended = None, True
            self._forget_memory()
            self._say(f"rank {self._world.rank} can't be profiled: {error!r}")

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            torch.cuda.synchronize()
        self._profile = profile(activities=activities)
        self._profile.start()
        self._begun = time.perf_counter()

    def stop(self) -> None:
        """Ends the profile and writes it down, if one has begun; says so if none came of it. A
        profile that can't be written costs no run."""
        if self._ended:
            return
        taken, self._profile, self._ended = self._profile, None, True
        try:
            if taken is not None:
                self._end(taken)
            if not self._taken:
                self._say("nothing is profiled: the first step warms up, and none came after it")
        except Exception as error:  # noqa: BLE001 - a full disk, or a trace of another form
            self._say(f"the profile of rank {self._world.rank} can't be written: {error!r}")
        finally:
            self._forget_memory()
        heartbeat = self._world.heartbeat
        heartbeat.enter("save")
        if heartbeat.clock is not None:
            heartbeat.clock.take()  # what this took is no part of a step

    def _end(self, taken: profile) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._begun
        taken.stop()
        if self._taken:
            self._write(taken, seconds)
            self._say(f"profiled {self._taken} steps: {self._folder}")

    def _forget_memory(self) -> None:
        """The allocator's history takes memory and time for as long as it is kept."""
        if self._on_gpu:
            with suppress(RuntimeError):
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, taken: profile, seconds: float) -> None:
        rank = self._world.rank
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank-{rank}.trace.json.gz"
        taken.export_chrome_trace(str(trace))
        found = add_up(read_trace(trace), rank=rank, steps=self._taken, seconds=seconds)
        atomic_write(self._folder / f"rank-{rank}.json", found.to_json(indent=2) + "\n")
        if self._on_gpu:
            with suppress(RuntimeError):  # an allocator that keeps no history
                memory = self._folder / f"rank-{rank}.memory.pickle"
                torch.cuda.memory._dump_snapshot(str(memory))  # type: ignore[no-untyped-call]
