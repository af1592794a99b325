"""What the launcher does after a failure, with ranks so light that they start at once."""

from __future__ import annotations

import json
import platform
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardtune.errors import LaunchError
from shardtune.launch.failure import Failure
from shardtune.launch.restart_policy import RestartPolicy, halvings, past_attempts
from shardtune.launch.supervisor import run_local

BEGINNING = """\
import os, signal, sys, time
from pathlib import Path
from shardtune.core.host.heartbeat import open_heartbeat
from shardtune.launch import HEARTBEAT_FD
from shardtune.launch.error_file import reporting_errors
from shardtune.launch.process_info import dump_stack_on_signal
folder, attempt = Path(sys.argv[1]), int(sys.argv[2])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dump_stack_on_signal()
heartbeat = open_heartbeat(int(os.environ[HEARTBEAT_FD]), rank, ranks)
(folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
def steps(first, last):
    for step in range(first, last):
        heartbeat.begin(step)
        for phase in ("collective", "forward", "backward", "update"):
            heartbeat.enter(phase)
        time.sleep(0.02)
def together(name):
    (folder / f"{name}-{attempt}-{rank}").touch()
    while not all((folder / f"{name}-{attempt}-{r}").exists() for r in range(ranks)):
        time.sleep(0.01)
"""


class Place:
    """A folder with the ranks' script, and what came of running it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, text: str, **policy: Any) -> int:
        script = self.folder / "rank.py"
        script.write_text(BEGINNING + textwrap.dedent(text), encoding="utf-8")
        attempts = iter(range(1, 99))

        def again(halvings: int) -> Sequence[str]:
            return [str(script), str(self.folder), str(next(attempts)), str(halvings)]

        command = [str(script), str(self.folder), "0", "0"]
        logs = self.folder / "logs"
        return run_local(
            command, processes=2, threads=1, logs=logs, policy=RestartPolicy(**policy), again=again
        )

    def events(self) -> list[dict[str, Any]]:
        text = (self.folder / "logs" / "events.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("pid-*")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def assert_gone(place: Place) -> None:
    assert not [pid for pid in place.pids() if psutil.pid_exists(pid)]


DIES_ONCE = """
    steps(1, 5)
    together("there")
    if attempt == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.0 if attempt else 60)
"""


def test_a_killed_rank_is_replaced(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert place.run(DIES_ONCE, restarts=1) == 0
    (event,) = place.events()
    assert (event["kind"], event["rank"], event["step"]) == ("restart", 1, 4)
    assert (
        "rank 1: was killed by SIGKILL without an error report in step 4 (update)" in event["cause"]
    )
    assert "(restart 1 of 1)" in capfd.readouterr().err
    assert len(place.pids()) == 4
    assert_gone(place)
    assert time.monotonic() - begun < 40


def test_none_is_replaced_unless_asked_for(place: Place) -> None:
    with pytest.raises(LaunchError) as caught:
        place.run(DIES_ONCE, restarts=0)
    assert len(caught.value.problems) == 1
    assert_gone(place)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "the process is stopped"),
        ("import ctypes; ctypes.PyDLL(None).sleep(30)", "rank.py"),
        ("time.sleep(30)", "rank.py"),
    ],
    ids=["stopped", "gil", "asleep"],
)
def test_a_hung_rank_is_named_and_replaced(place: Place, text: str, named: str) -> None:
    script = f"""
        steps(1, 20)
        together("there")
        if attempt == 0 and rank == 0:
            heartbeat.begin(20)
            heartbeat.enter("forward")
            (folder / "hung").write_text(str(time.time()))
            {text}
        if attempt == 0:
            heartbeat.begin(20)
            heartbeat.enter("forward")
            heartbeat.enter("backward")
            time.sleep(60)
    """
    assert place.run(script, restarts=1, patience=2.0) == 0
    (event,) = place.events()
    assert (event["rank"], event["step"]) == (0, 20)
    assert "in step 20 (forward)" in event["text"]
    assert named in event["text"]
    assert event["time"] - float((place.folder / "hung").read_text()) < 5
    assert_gone(place)


def test_a_loop_of_failures_ends(place: Place) -> None:
    script = """
        with reporting_errors():
            steps(1, 4)
            if rank == 1:
                raise ValueError("each time")
            time.sleep(60)
    """
    with pytest.raises(LaunchError) as caught:
        place.run(script, restarts=9)
    cause, loop = caught.value.problems
    assert cause.place == "rank 1"
    assert "ValueError: each time" in cause.fact
    assert (loop.place, loop.fact[:14]) == ("step 3", "failed 3 times")
    assert [event["kind"] for event in place.events()] == ["restart", "restart", "failed"]
    assert_gone(place)


def test_failures_at_different_steps_end_at_the_limit(place: Place) -> None:
    script = """
        with reporting_errors():
            steps(1, 4 + attempt)
            raise ValueError("each time at another step")
    """
    with pytest.raises(LaunchError) as caught:
        place.run(script, restarts=2)
    assert caught.value.problems[1].place == "launch.restarts"
    assert len(place.events()) == 3


@pytest.mark.parametrize(
    "text",
    [
        'raise DataError("no rows")',
        'heartbeat.begin(1); raise DataError("no rows")',
        "raise KeyError",
    ],
    ids=["problem", "problem-later", "before-the-first-step"],
)
def test_what_would_fail_again_is_not_tried_again(place: Place, text: str) -> None:
    script = f"""
        from shardtune.errors import DataError
        with reporting_errors():
            {text}
    """
    with pytest.raises(LaunchError):
        place.run(script, restarts=3)
    assert [event["kind"] for event in place.events()] == ["failed"]


WANTS_MEMORY = """
    from shardtune.errors import OutOfMemory
    with reporting_errors():
        if {step}:
            heartbeat.begin({step})
        if int(sys.argv[3]) < {enough}:
            raise OutOfMemory("too much")
"""


def test_memory_is_found_by_halving(place: Place) -> None:
    assert place.run(WANTS_MEMORY.format(enough=2, step=3), halvings=3) == 0
    assert [event["kind"] for event in place.events()] == ["restart", "restart"]
    assert "half the micro-batch" in place.events()[0]["text"]


def test_what_was_chosen_too_large_is_halved_before_the_first_step(place: Place) -> None:
    assert place.run(WANTS_MEMORY.format(enough=2, step=0), halvings_at_start=3) == 0
    assert [event["kind"] for event in place.events()] == ["restart", "restart"]


@pytest.mark.parametrize(
    ("steps", "told", "expected"),
    [([0, 0], True, 2), ([3, 0], True, 0), ([0, 3, 0], True, 1), ([0, 0], False, 0)],
)
def test_only_what_comes_before_any_step_is_of_the_start(
    steps: list[int], told: bool, expected: int
) -> None:
    failures = [Failure("memory", 0, step, (), reported=told) for step in steps]
    assert halvings(failures, RestartPolicy(halvings_at_start=9)) == expected
    assert halvings(failures, RestartPolicy(halvings=9)) == len(steps)


@pytest.mark.parametrize(
    "policy",
    [{"halvings": 1}, {"restarts": 3}, {"halvings_at_start": 9}],
    ids=["too-few", "not-asked", "too-late"],
)
def test_or_it_is_not(place: Place, policy: dict[str, int]) -> None:
    with pytest.raises(LaunchError, match="too much"):
        place.run(WANTS_MEMORY.format(enough=9, step=3), **policy)


@pytest.mark.skipif(platform.system() != "Linux", reason="needs /proc")
def test_a_rank_that_complains_of_a_killed_one_is_not_the_cause(place: Place) -> None:
    # The first thread of a process that is taken down is gone before the rest of it: here for as
    # long as a large rank needs to give its memory back, in which its peer complains and leaves.
    script = """
        import ctypes, platform, threading
        LEAVE = {"aarch64": 93, "x86_64": 60}[platform.machine()]
        def die():
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        def dying(pid):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        with reporting_errors():
            steps(1, 3)
            together("there")
            if rank == 1:
                threading.Thread(target=die).start()
                ctypes.CDLL(None).syscall(LEAVE, 0)
            peer = int((folder / f"pid-{attempt}-1").read_text())
            while not dying(peer):
                time.sleep(0.01)
            raise ConnectionError("peer closed")
    """
    with pytest.raises(LaunchError, match="rank 1: was killed by SIGKILL"):
        place.run(script)


def test_what_a_rank_has_started_ends_with_it(place: Place) -> None:
    script = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (folder / f"pid-child-{rank}").write_text(str(child.pid))
        together("there")
        if rank == 0:
            os._exit(3)
        time.sleep(60)
    """
    with pytest.raises(LaunchError, match="rank 0: ended with code 3 without an error report"):
        place.run(script)
    assert len(place.pids()) == 4
    _until(lambda: not [pid for pid in place.pids() if psutil.pid_exists(pid)])


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_attempt_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert past_attempts(tmp_path / "not there") == 0
    for name in ("attempt-3", "attempt-10", "attempt-x", "attempt-"):
        (tmp_path / name).mkdir()
    assert past_attempts(tmp_path) == 11
