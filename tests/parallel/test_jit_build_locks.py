"""A compilation that was killed must not stop every run after it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from shardtune.core.world import World
from shardtune.parallel.deepspeed.jit_build_locks import clear_dead_builds
from tests.conftest import Logged
from tests.ranks import on_ranks


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "async_io").mkdir()
    return tmp_path / "async_io" / "lock"


def left_behind(lock: Path, seconds: float) -> None:
    """As after a kill: the file is there, and nobody has it open."""
    lock.touch()
    then = time.time() - seconds
    os.utime(lock, (then, then))


def test_the_lock_of_a_dead_compilation_goes(lock: Path) -> None:
    left_behind(lock, seconds=300)
    assert clear_dead_builds() == [lock]
    assert not lock.exists()


@pytest.mark.slow
def test_a_compilation_on_another_machine_has_time_to_show_itself(
    lock: Path, logged: Logged
) -> None:
    left_behind(lock, seconds=0)
    began = time.time()
    assert clear_dead_builds(quiet=1.5) == [lock]
    assert time.time() - began >= 1
    assert "no process here compiles" in logged.text


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_the_lock_of_a_living_one_stays(lock: Path) -> None:
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    os.utime(lock, (0, 0))
    assert clear_dead_builds() == []
    assert lock.exists()
    baton.release()


def compile_after_clearing(world: World, folder: str) -> bool:
    """What torch does next: whoever creates the file compiles, the others wait for it to go."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    clear_dead_builds()
    baton = FileBaton(str(Path(folder) / "async_io" / "lock"))
    if not baton.try_acquire():
        baton.wait()
        return False
    Path(folder, f"compiled-by-{world.rank}").touch()
    time.sleep(1)
    baton.release()
    return True


def test_ranks_that_clear_at_the_same_time_compile_one_after_another(tmp_path: Path) -> None:
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    left_behind(lock, seconds=300)
    compiled = on_ranks(4, compile_after_clearing, str(tmp_path))
    assert any(compiled)
    assert not lock.exists()
    assert len(list(tmp_path.glob("compiled-by-*"))) == sum(compiled)
