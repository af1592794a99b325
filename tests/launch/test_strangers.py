"""Strangers: who doesn't know a run's secret can neither stop nor change it, and costs nothing."""

from __future__ import annotations

import os
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from shardtune.core.host.network import free_port
from shardtune.launch import SECRET
from shardtune.launch.gate import Gate, knock
from shardtune.launch.supervisor import run_local

TIMEOUT = timedelta(seconds=5)
OURS, THEIRS = "127.0.0.1", "127.0.0.9"  # two addresses that this machine has


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Gate, int]]:
    monkeypatch.setenv(SECRET, "what only the run knows")
    monkeypatch.setattr("shardtune.launch.gate.PROOF_TIMEOUT", 0.5)
    port = free_port()
    with closing(Gate(OURS, port, "--head", TIMEOUT)) as found:
        yield found, port


def reaches(port: int, source: str) -> bool:
    """Whether a connection from an address is taken."""
    with socket.socket() as stranger:
        stranger.bind((source, 0))
        stranger.settimeout(0.5)
        return stranger.connect_ex((OURS, port)) == 0


def listening(pid: int) -> set[tuple[str, int]]:
    """What a process listens on."""
    found = psutil.Process(pid).net_connections("inet")
    return {tuple(each.laddr) for each in found if each.status == "LISTEN"}


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_who_knows_the_secret_is_told_where_the_store_is(gate: tuple[Gate, int]) -> None:
    kept, port = gate
    store = TCPStore(OURS, knock(OURS, port), is_master=False, timeout=TIMEOUT)
    store.set("attempt", "7")
    assert kept.store.get("attempt") == b"7"


def test_who_does_not_is_told_nothing(
    gate: tuple[Gate, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port = gate
    monkeypatch.setenv(SECRET, "a guess")
    with pytest.raises(PermissionError, match=f"another {SECRET} than this process"):
        knock(OURS, port)
    monkeypatch.delenv(SECRET)
    with pytest.raises(PermissionError):
        knock(OURS, port)


@pytest.mark.slow
def test_a_stranger_reaches_no_store_and_costs_no_descriptor(gate: tuple[Gate, int]) -> None:
    """Not even one that has found its port."""
    kept, port = gate
    before = files()
    assert reaches(kept.store_port, OURS)
    assert not any(reaches(kept.store_port, THEIRS) for _ in range(3))
    strangers = [socket.create_connection((OURS, port)) for _ in range(20)]
    for number, stranger in enumerate(strangers):
        if number % 2:
            stranger.sendall(b"GET / HTTP/1.1\r\n" + os.urandom(80))
    store = TCPStore(OURS, knock(OURS, port), is_master=False, timeout=TIMEOUT)  # meanwhile
    store.set("attempt", "1")
    deadline = time.monotonic() + 10
    # Ours hold one each; the gate's ends of them are closed.
    while files() > before + len(strangers) + 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert files() <= before + len(strangers) + 4
    for stranger in strangers:
        stranger.close()


def test_a_closed_gate_gives_its_port_back(gate: tuple[Gate, int]) -> None:
    kept, port = gate
    kept.close()
    with closing(Gate(OURS, port, "--head", TIMEOUT)) as again:
        assert knock(OURS, port) == again.store_port


def test_who_stands_where_the_gate_should_be_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sees a proof, and can't use it: the next one is asked for something else."""
    monkeypatch.setenv(SECRET, "what only the run knows")
    with socket.create_server((OURS, 0)) as impostor:

        def lie() -> None:
            guest, _ = impostor.accept()
            with guest:
                guest.sendall(bytes(32))
                guest.recv(64)
                guest.sendall((1234).to_bytes(2, "big") + bytes(32))

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(PermissionError):
            knock(OURS, impostor.getsockname()[1])
        thread.join()


RANK = """
import os, sys, time
from pathlib import Path
from shardtune.launch.process_group import join_process_group
folder = Path(sys.argv[1])
with join_process_group(threads=1) as world:
    (folder / f"started-{world.rank}").write_text(str(os.getpid()))
    steps = 0
    while not world.any((folder / "enough").exists()):
        steps += 1
        time.sleep(0.02)
    (folder / f"steps-{world.rank}").write_text(str(steps))
"""


def test_strangers_neither_stop_nor_slow_the_ranks_of_one_machine(tmp_path: Path) -> None:
    """Nothing of ours listens there: only gloo, which keeps a connection that says nothing."""
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    before, seen = listening(os.getpid()), {}

    def attack() -> None:
        marks = [tmp_path / f"started-{rank}" for rank in range(2)]
        while not all(mark.exists() and mark.read_text() for mark in marks):
            time.sleep(0.05)
        seen["launcher"] = listening(os.getpid())
        seen["ranks"] = {each for mark in marks for each in listening(int(mark.read_text()))}
        for address in seen["ranks"]:
            for number in range(12):
                with socket.create_connection(address) as stranger:
                    stranger.sendall(os.urandom(100) if number % 2 else b"")
        time.sleep(0.5)
        (tmp_path / "enough").touch()

    thread = threading.Thread(target=attack)
    thread.start()
    command = [str(tmp_path / "rank.py"), str(tmp_path)]
    assert run_local(command, processes=2, threads=1, logs=tmp_path / "logs") == 0
    thread.join()
    assert seen["launcher"] <= before
    assert seen["ranks"]
    assert (tmp_path / "steps-0").read_text() == (tmp_path / "steps-1").read_text()
