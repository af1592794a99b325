"""The processes of trackers, without ranks: they follow a file, and are watched."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.trackers import CSVFiles
from shardtune.track import watch
from shardtune.track.tracker_process import step_forward
from shardtune.track.watch import Trackers
from tests.track.read_back import csv_points
from tests.track.tracked_runs import RUN, append, begin_run, end_run, points, step_lines

pytestmark = pytest.mark.process

PATIENCE = 120.0  # seconds, on a busy machine


def wait_until(reached: Callable[[], bool], trackers: Trackers | None = None) -> None:
    """Trackers run when a core is idle; where they are given, a test doesn't wait for that."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        for each in trackers._watched if trackers is not None else ():
            step_forward(each.process.pid)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_log_is_followed_while_it_grows_and_begins_anew(tmp_path: Path) -> None:
    run, said = begin_run(tmp_path / "run", 4), list[str]()
    table = run / "track" / "csv" / "run" / "points.csv"

    def has(step: int) -> Callable[[], bool]:
        return lambda: table.exists() and f"\n{step},train/loss," in table.read_text()

    section = CSVFiles(finish_seconds=PATIENCE)
    with Trackers((section,), {"model.name": "tiny"}, run, RUN, said.append) as trackers:
        wait_until(has(4), trackers)
        append(run, step_lines(5, 8))
        wait_until(has(8), trackers)
        RunDir(run).jsonl.forget_after(6)  # as a run that restarts from its checkpoint
        append(run, step_lines(7, 12))
        end_run(run)
    wanted = [(name, s, v) for name, curve in points(run).items() for s, v in curve.items()]
    assert sorted(csv_points(table.parent)) == sorted(wanted)
    assert (table.parent / "answers-12.csv").exists()
    assert not [line for line in said if "stopped" in line]


def test_its_process_leaves_everything_to_the_ranks(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run", 1)
    with Trackers((CSVFiles(finish_seconds=PATIENCE),), {}, run, RUN, print) as trackers:
        (each,) = trackers._watched
        pid = each.process.pid
        first = Path(f"/proc/{pid}/oom_score_adj")
        wait_until(lambda: first.read_text().strip() == "1000")
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        assert os.getsid(pid) == pid
    assert not each.is_alive()


@pytest.mark.parametrize("hurt", ["disk", "end"])
def test_a_tracker_that_has_to_go_is_told_once(
    hurt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = begin_run(tmp_path / "run", 1), list[str]()
    free = [10 << 30]
    monkeypatch.setattr(watch, "_free", lambda folder: free[0])
    with Trackers((CSVFiles(),), {}, run, RUN, said.append) as trackers:
        wait_until((run / "track" / "csv.json").exists, trackers)
        if hurt == "disk":
            free[0] = 1 << 20
        else:
            trackers._watched[0].end_input()  # it ends well, but the run hasn't
        wait_until(lambda: len(said) > 0, trackers)
    (line,) = said
    told = {"disk": "less than 1024 MiB of disk are left", "end": "ended with exit code 0"}
    assert line.startswith(f"track: csv stopped: {told[hurt]}")


def test_the_disk_is_watched_to_the_end(tmp_path: Path) -> None:
    """A tracker that had no core while the run took them all writes when the run has ended."""
    run, said = begin_run(tmp_path / "run", 1), list[str]()
    with Trackers((CSVFiles(disk_mib=4, finish_seconds=PATIENCE),), {}, run, RUN, said.append) as t:
        (each,) = t._watched
        wait_until((run / "track" / "csv.json").exists, t)
        os.kill(each.process.pid, signal.SIGSTOP)  # the end has to wait for it
        t._ended.set()
        assert t._watcher is not None
        t._watcher.join()
        (each.folder / "large.bin").write_bytes(bytes(5 << 20))
    assert [line for line in said if "it wrote more than 4 MiB" in line]
    assert not each.folder.exists()


def test_a_run_that_fails_waits_for_no_tracker(tmp_path: Path) -> None:
    run, section = begin_run(tmp_path / "run", 1), CSVFiles(finish_seconds=3600)
    with suppress(RuntimeError), Trackers((section,), {}, run, RUN, print) as trackers:
        (each,) = trackers._watched
        wait_until((run / "track" / "csv.json").exists, trackers)
        os.kill(each.process.pid, signal.SIGSTOP)  # it hangs
        begun = time.monotonic()
        raise RuntimeError("a rank is lost")
    assert not each.is_alive()
    assert time.monotonic() - begun < PATIENCE


def test_the_command_that_sends_the_rest_can_be_pasted(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.write_text("a file, so no folder of a tracker can be made", encoding="utf-8")
    said: list[str] = []
    with Trackers((CSVFiles(),), {}, run, RUN, said.append):
        pass
    assert said[0].endswith(f"and `shardtune track '{run}' --to csv` sends the rest later")
