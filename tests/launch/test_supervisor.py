"""Starting ranks, and every way in which they can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from shardtune.errors import LaunchError, LaunchRefused
from shardtune.launch.supervisor import run_local


def script(folder: Path, text: str) -> list[str]:
    path = folder / "rank.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return [str(path)]


def test_ranks_find_each_other(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        f"""
        import torch
        from shardtune.launch.process_group import join_process_group
        with join_process_group(threads=1) as world:
            total = world.max(world.rank)
            assert world.any(world.rank == 2) and not world.any(False)
            open(r"{tmp_path}/rank-%d" % world.rank, "w").write(f"{{total}} of {{world.size}}")
        """,
    )
    assert run_local(command, processes=3, threads=1, logs=tmp_path / "logs") == 0
    assert [(tmp_path / f"rank-{n}").read_text() for n in range(3)] == ["2.0 of 3"] * 3


def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import os, psutil
        from shardtune.launch.process_group import join_process_group
        with join_process_group(threads=1) as world:
            world.barrier()
            ours = {os.getppid(), *(c.pid for c in psutil.Process(os.getppid()).children())}
            listening = [c.laddr.ip for c in psutil.net_connections("inet")
                         if c.pid in ours and c.status == "LISTEN"]
            assert listening and set(listening) <= {"127.0.0.1", "::1"}, listening
            world.barrier()
        """,
    )
    assert run_local(command, processes=2, threads=1, logs=tmp_path / "logs") == 0


def test_the_rank_that_failed_first_is_reported(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        from shardtune.launch.process_group import join_process_group
        from shardtune.launch.error_file import reporting_errors
        with reporting_errors(), join_process_group(threads=1) as world:
            if world.rank == 1:
                raise ValueError("the second rank has had enough")
            world.barrier()
        """,
    )
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="the second rank has had enough") as caught:
        run_local(command, processes=3, threads=1, logs=tmp_path / "logs")
    assert caught.value.problems[0].place == "rank 1"
    assert time.monotonic() - begun < 25


def test_a_problem_of_a_rank_is_shown_as_a_problem(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        from shardtune.errors import DataError, Problem
        from shardtune.launch.error_file import reporting_errors
        with reporting_errors():
            raise DataError(Problem("a.jsonl:3", "is broken", "mend it"))
        """,
    )
    with pytest.raises(LaunchRefused) as caught:
        run_local(command, processes=1, threads=1, logs=tmp_path / "logs")
    assert str(caught.value) == "a.jsonl:3: is broken\n    fix: mend it"
    assert caught.value.exit_code == 2


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """,
    )
    with pytest.raises(
        LaunchError, match="rank 1: was killed by SIGKILL without an error report in the start"
    ):
        run_local(command, processes=2, threads=1, logs=tmp_path / "logs")


# Signals: a launcher in a process of its own, with ranks that count what they do ----------------

LAUNCHER = """
import sys
from pathlib import Path
from shardtune.launch.supervisor import run_local
folder = Path(sys.argv[1])
sys.exit(run_local([str(folder / "rank.py"), str(folder)], processes=2, threads=1, logs=folder))
"""
RANK = """
import sys, time
from pathlib import Path
from shardtune.launch.process_group import join_process_group
folder, patient = Path(sys.argv[1]), {patient}
with join_process_group(threads=1) as world:
    (folder / f"started-{{world.rank}}").touch()
    while not (world.stop_request() and patient):
        time.sleep(0.05)
    (folder / f"clean-{{world.rank}}").touch()
"""
SLOW_TO_START = """
import os, sys, time
from pathlib import Path
from shardtune.launch.error_file import reporting_errors
with reporting_errors():
    assert "torch" not in sys.modules  # it is imported here, where an interruption is expected
    (Path(sys.argv[1]) / ("started-" + os.environ["RANK"])).touch()
    time.sleep(60)
"""


def launch(
    folder: Path, *, patient: bool, rank: str = RANK
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    (folder / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    (folder / "rank.py").write_text(rank.format(patient=patient), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(folder / "launcher.py"), str(folder)],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not all((folder / f"started-{rank}").exists() for rank in range(2)):
        assert process.poll() is None, process.stderr
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process, ranks = launch(tmp_path, patient=True)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert ("stopping after this step" in said) == (number == signal.SIGINT)
    assert all((tmp_path / f"clean-{rank}").exists() for rank in range(2))
    assert_gone(ranks)


def test_a_signal_before_the_ranks_have_joined_is_no_fault(tmp_path: Path) -> None:
    process, ranks = launch(tmp_path, patient=True, rank=SLOW_TO_START)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "\nstopping after this step; once more to stop at once\n"
    assert_gone(ranks)


STOPPED_TOGETHER = """
import os, sys, time
from pathlib import Path
from shardtune.launch.process_group import StopSignals, join_process_group
folder, stop_signals = Path(sys.argv[1]), StopSignals()
with join_process_group(threads=1, stop_signals=stop_signals) as world:
    (folder / f"pid-{{world.rank}}").write_text(str(os.getpid()))
    (folder / f"started-{{world.rank}}").touch()
    while not world.stop_request():
        time.sleep(0.05)
    world.heartbeat.enter("finish")
    (folder / f"clean-{{world.rank}}").touch()
sys.exit(stop_signals.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all_with_its_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    process, ranks = launch(tmp_path, patient=True, rank=STOPPED_TOGETHER)
    os.kill(int((tmp_path / "pid-1").read_text()), number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number, said
    assert all((tmp_path / f"clean-{rank}").exists() for rank in range(2))
    assert_gone(ranks)


def test_a_signal_to_one_rank_that_has_not_joined_stops_all(tmp_path: Path) -> None:
    process, ranks = launch(tmp_path, patient=True, rank=SLOW_TO_START)
    ranks[-1].terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert said == ""
    assert_gone(ranks)


def test_two_signals_stop_at_once(tmp_path: Path) -> None:
    process, ranks = launch(tmp_path, patient=False)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert not (tmp_path / "clean-0").exists()
    assert_gone(ranks)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses the kernel's death signal")
def test_a_killed_launcher_leaves_nobody_behind(tmp_path: Path) -> None:
    process, ranks = launch(tmp_path, patient=False)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert_gone(ranks)
