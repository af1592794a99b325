"""Launchers of two hosts, with ranks so light that they start at once."""

from __future__ import annotations

import re
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardtune.errors import JobError
from shardtune.launch.node import Node
from shardtune.launch.store_client import LOST_AFTER
from tests.hosts import Host, two_hosts

PORT = 29400
LAUNCHER = """
import sys
from pathlib import Path
from shardtune.cli.main import leave
from shardtune.errors import ShardtuneError
from shardtune.launch.restart_policy import RestartPolicy
from shardtune.launch.supervisor import run_local
from shardtune.launch.multi_node import MultiNode
from shardtune.launch.node import Node
folder, number, restarts, wait = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 20
try:
    node = Node.parse(2, number, "10.217.0.1:29400")
    launchers = MultiNode(node, 2, wait=wait, say=lambda text: print(text, flush=True))
    launchers.must_match = {"the job": sys.argv[4]}
    command = [str(folder / "rank.py"), str(folder)]
    code = run_local(
        [*command, "first"], processes=2, threads=1, logs=folder / "logs",
        policy=RestartPolicy(restarts=restarts), again=lambda halvings: [*command, "again"],
        launchers=launchers,
    )
except ShardtuneError as error:
    print(f"error: {error}", flush=True)
    code = error.exit_code
leave(code)
"""
BEGINNING = """
import os, signal, sys, time
from pathlib import Path
from shardtune.core.host.heartbeat import open_heartbeat
from shardtune.launch import HEARTBEAT_FD
from shardtune.launch.process_info import dump_stack_on_signal
folder, life = Path(sys.argv[1]), sys.argv[2]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dump_stack_on_signal()
heartbeat = open_heartbeat(int(os.environ[HEARTBEAT_FD]), rank, ranks)
assert (ranks, os.environ["LOCAL_WORLD_SIZE"], int(os.environ["LOCAL_RANK"])) == (4, "2", rank % 2)
def together(name):
    (folder / f"{name}-{life}-{rank}").touch()
    while not all((folder / f"{name}-{life}-{r}").exists() for r in range(ranks)):
        time.sleep(0.01)
def steps(first, last):
    for step in range(first, last):
        heartbeat.begin(step)
        heartbeat.enter("collective")
        time.sleep(0.02)
together("here")
"""
ENDLESS = "steps(1, 100_000)"


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


class Place:
    """A folder that both hosts see, with what they run."""

    def __init__(self, folder: Path, hosts: tuple[Host, Host], ranks: str) -> None:
        self.folder, self.hosts = folder, hosts
        (folder / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
        (folder / "rank.py").write_text(BEGINNING + textwrap.dedent(ranks), encoding="utf-8")
        self.running: list[subprocess.Popen[str]] = []

    def start(self, number: int, *, restarts: int = 0, job: str = "same") -> subprocess.Popen[str]:
        words = (str(self.folder), str(number), str(restarts), job)
        process = self.hosts[number].start("launcher.py", *words, cwd=self.folder)
        self.running.append(process)
        return process

    def both(self, *, restarts: int = 0) -> list[subprocess.Popen[str]]:
        return [self.start(number, restarts=restarts) for number in range(2)]

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, names
            time.sleep(0.05)


def said(process: subprocess.Popen[str], timeout: float = 60) -> str:
    return process.communicate(timeout=timeout)[0]


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout
    process.stdout.close()


@pytest.fixture
def place(
    tmp_path: Path, hosts: tuple[Host, Host], request: pytest.FixtureRequest
) -> Iterator[Place]:
    place = Place(tmp_path, hosts, request.param)
    yield place
    for process in place.running:
        end(process)


@pytest.mark.long
@pytest.mark.parametrize("place", ["steps(1, 10)"], indirect=True)
def test_four_ranks_on_two_hosts_come_to_their_end(place: Place) -> None:
    processes = place.both()
    assert [said(process) and process.returncode for process in processes] == [0, 0]
    assert all((place.folder / f"here-first-{rank}").exists() for rank in range(4))


@pytest.mark.slow
@pytest.mark.parametrize("place", [ENDLESS], indirect=True)
def test_a_cut_link_stops_both_sides_with_the_cause(place: Place) -> None:
    processes = place.both()
    place.wait_for(*(f"here-first-{rank}" for rank in range(4)))
    time.sleep(1.0)
    begun = time.monotonic()
    place.hosts[1].cut()
    try:
        texts = [said(process, timeout=60) for process in processes]
    finally:
        place.hosts[1].mend()
    assert time.monotonic() - begun < LOST_AFTER + 15
    assert [process.returncode for process in processes] == [1, 1]
    assert re.search(r"node 1: no heartbeat for 1\d s: the link to it is down", texts[0])
    assert re.search(r"node 0 \(10\.217\.0\.1\): no heartbeat for 1\d s", texts[1])


DIES_ONCE = """
steps(1, 5)
if life == "first" and rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
steps(5, 10 if life == "again" else 100_000)
"""


@pytest.mark.long
@pytest.mark.parametrize("place", [DIES_ONCE], indirect=True)
def test_a_rank_that_dies_on_one_host_is_named_on_both_and_all_start_again(place: Place) -> None:
    processes = place.both(restarts=2)
    texts = [said(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    for text in texts:
        assert "rank 3: was killed by SIGKILL without an error report in step 4" in text
        assert "going on from the last checkpoint (restart 1 of 2)" in text
    assert all((place.folder / f"here-again-{rank}").exists() for rank in range(4))


@pytest.mark.long
@pytest.mark.parametrize("place", ["steps(1, 10 if life == 'again' else 100_000)"], indirect=True)
def test_a_node_that_goes_away_and_comes_back(place: Place) -> None:
    first, second = place.both(restarts=2)
    place.wait_for(*(f"here-first-{rank}" for rank in range(4)))
    end(second)
    again = place.start(1, restarts=2)
    texts = [said(first), said(again)]
    assert [first.returncode, again.returncode] == [0, 0], texts
    assert "node 1: its launcher was started again" in texts[0]


@pytest.mark.long
@pytest.mark.parametrize("place", ["steps(1, 10 if life == 'again' else 100_000)"], indirect=True)
def test_a_link_that_is_mended_is_used_again(place: Place) -> None:
    processes = place.both(restarts=2)
    place.wait_for(*(f"here-first-{rank}" for rank in range(4)))
    place.hosts[1].cut()
    time.sleep(LOST_AFTER + 5)
    place.hosts[1].mend()
    texts = [said(process, timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "node 1: no heartbeat for 1" in texts[0]
    assert "node 0 (10.217.0.1): no heartbeat for 1" in texts[1]


HANGS = """
steps(1, 5)
if rank == 2:
    heartbeat.begin(5)
    time.sleep(60)
for _ in range(3):
    heartbeat.begin(5)
    heartbeat.enter("forward")
heartbeat.enter("collective")
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize("place", [HANGS], indirect=True)
def test_a_rank_that_hangs_on_one_host_is_blamed_on_both(place: Place) -> None:
    processes = place.both()
    for text in [said(process) for process in processes]:
        assert "rank 2: hung for" in text
        assert "in step 5 (data)" in text


@pytest.mark.long
@pytest.mark.parametrize("place", [ENDLESS], indirect=True)
def test_nodes_with_different_jobs_do_not_begin(place: Place) -> None:
    processes = [place.start(0), place.start(1, job="another")]
    for text in [said(process) for process in processes]:
        assert "node 1: the job is another, and on node 0 same" in text
    assert not (place.folder / "here-first-0").exists()


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ((2, 2, "10.0.0.1:80"), "there is no node 2 among 2"),
        ((2, 0, "10.0.0.1"), "'10.0.0.1' is not HOST:PORT"),
        ((2, 0, "10.0.0.1:x"), "is not HOST:PORT"),
        ((2, 1, "127.0.0.1:80"), "127.0.0.1 is this node itself"),
        ((2, 0, "127.0.0.1:80"), "no other node reaches 127.0.0.1"),
        ((2, 0, "127.0.0.1:80", "nowhere"), "there is no interface 'nowhere'"),
    ],
)
def test_what_is_wrong_with_a_node_is_said(words: tuple[int, int, str], fact: str) -> None:
    with pytest.raises(JobError, match=fact):
        Node.parse(*words)
