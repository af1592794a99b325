"""Made once, whole or not at all, by any number of processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardtune.core.files.atomic_write import atomic_folder
from shardtune.core.files.cache import cache_dir, file_lock, made_once


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "shardtune"


@pytest.mark.parametrize("useless", ["", "relative/path"])
def test_the_cache_falls_back_to_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, useless: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", useless)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "shardtune"


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "made" / "thing"
    with atomic_folder(target) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("text")
        assert not target.exists()
    assert (target / "inner" / "file").read_text() == "text"
    assert [entry.name for entry in target.parent.iterdir()] == ["thing"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def stop_half_way() -> None:
        with atomic_folder(tmp_path / "thing") as partial:
            (partial / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    assert list(tmp_path.iterdir()) == []


def test_who_came_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    with atomic_folder(target) as ours:
        (ours / "file").write_text("ours")
        with atomic_folder(target) as theirs:
            (theirs / "file").write_text("theirs")
    assert (target / "file").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    target.write_text("precious")
    with pytest.raises(NotADirectoryError), atomic_folder(target) as partial:
        (partial / "file").write_text("ours")
    assert target.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [target]


def test_an_ordinary_folder_is_readable_by_others_as_the_umask_says(tmp_path: Path) -> None:
    (tmp_path / "ordinary").mkdir()
    with atomic_folder(tmp_path / "thing"):
        pass
    assert (tmp_path / "thing").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def _make_slowly(folder: Path) -> None:
    with (folder.parent / "makers").open("a") as makers:
        makers.write(f"{os.getpid()}\n")
    time.sleep(0.3)  # long enough for every other process to arrive
    (folder / "file").write_text("made")


def _ask(target: Path) -> str:
    return (made_once(target, _make_slowly) / "file").read_text()


def test_many_processes_make_it_once(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(_ask, [target] * 4, chunksize=1) == ["made"] * 4
    assert len((tmp_path / "makers").read_text().splitlines()) == 1


def test_a_failed_maker_lets_the_next_one_try(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise RuntimeError("no luck")

    target = tmp_path / "thing"
    with pytest.raises(RuntimeError, match="no luck"):
        made_once(target, fail)
    assert not target.exists()
    assert _ask(target) == "made"


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    lock = tmp_path / "deep" / "lock"
    holder = (
        "import sys, time; from pathlib import Path\n"
        "from shardtune.core.files.cache import file_lock\n"
        "with file_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", holder, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        started = time.monotonic()
        process.send_signal(signal.SIGKILL)
        with file_lock(lock):
            assert time.monotonic() - started < 10
