"""A profile that can't be taken or written costs no run, and nothing of it stays on."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune.core.world import World
from shardtune.training import step_profiler
from shardtune.training.step_profiler import StepProfiler


def steps_of(folder: Path, *, left: int, device: str = "cpu") -> list[str]:
    """What the profiler says of a run of so many steps."""
    said: list[str] = []
    profiler = StepProfiler(folder, World(device=device), 2, left, said.append)
    for _ in range(left):
        profiler.after_step()
    profiler.stop()
    return said


class Profile:
    """In place of torch's profiler, which takes seconds to start."""

    def __init__(self, activities: Sequence[Any]) -> None:
        assert activities

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(gzip.compress(b"{}"))


@pytest.fixture(autouse=True)
def quick_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profiler, "profile", Profile)


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the allocator of a GPU was told to keep a history, each time that it was."""
    told: list[bool] = []

    def record(enabled: str | None = "all", **_: Any) -> None:
        told.append(enabled is not None)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return told


def test_a_run_that_is_too_short_says_so(tmp_path: Path, history: list[bool]) -> None:
    (line,) = steps_of(tmp_path / "profile", left=1, device="cuda:0")
    assert line.startswith("nothing is profiled")
    assert True not in history
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written(tmp_path: Path, history: list[bool]) -> None:
    (tmp_path / "profile").write_text("no folder")
    (line,) = steps_of(tmp_path / "profile", left=5, device="cuda:0")
    assert line.startswith("the profile of rank 0 can't be written: FileExistsError")
    assert history == [True, False]


def test_a_trace_that_is_not_as_we_know_them(tmp_path: Path) -> None:
    (line,) = steps_of(tmp_path, left=5)
    assert line == "the profile of rank 0 can't be written: KeyError('traceEvents')"


def test_a_profiler_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: list[bool]
) -> None:
    def start(self: Profile) -> None:
        raise RuntimeError("another profiler is on")

    monkeypatch.setattr(Profile, "start", start)
    (line,) = steps_of(tmp_path, left=5, device="cuda:0")
    assert line == "rank 0 can't be profiled: RuntimeError('another profiler is on')"
    assert history == [True, False]
