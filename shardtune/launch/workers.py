"""The processes of one attempt at a run on this machine: started together, ended together.

Each is in a session of its own, so that Ctrl-C reaches only the launcher, and so that whatever a
rank has started can be ended with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.core.host.heartbeat import Heartbeats
from shardtune.core.host.network import socket_environment
from shardtune.launch import HEARTBEAT_FD, LAUNCHER_PID, STACK_FILE, STORE_FILE
from shardtune.launch.error_file import ERROR_FILE, ErrorReport, read_error_report
from shardtune.launch.followed_log import FollowedLog
from shardtune.launch.process_info import is_dying
from shardtune.launch.torch_env import torch_environment

KILL_TIMEOUT = 10.0  # seconds in which the kernel has to have ended a killed process


@dataclass(frozen=True)
class Assignment:
    """Where the ranks of this machine stand among all, and where they find the others."""

    ranks: range
    """Of this machine."""
    world: int
    """World size: the number of all ranks, on all machines."""
    head: str
    port: int
    """Where the TCPStore is through which they find each other; a launcher keeps it."""
    interface: str
    attempt: int
    """Keeps what was written in the store in an earlier attempt apart."""
    store_file: str = ""
    """The FileStore that takes its place on one machine. Libraries still want an address and a
    port, where nobody listens then."""


class Workers:
    """The ranks of one attempt. `logs` gets what they print and, at need, their stacks.

    Rank 0 speaks to the person: its live view draws on the terminal itself. Where there is none it
    writes a log as the others do, which is shown here: so no reader of ours can keep it waiting.
    """

    def __init__(
        self, command: Sequence[str], assignment: Assignment, threads: int, logs: Path
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.heartbeats = Heartbeats(assignment.world)
        self._shown = FollowedLog(self._log(0)) if 0 in assignment.ranks else None
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in assignment.ranks:
                environment = os.environ | self._environment(rank, assignment, threads)
                self.ranks[rank] = self._start(rank, command, environment)
        except BaseException:
            self.close()
            raise

    def exit_codes(self) -> dict[int, int]:
        """How those ended that have ended: an exit code, or the number of a signal, negative."""
        found = ((rank, process.poll()) for rank, process in self.ranks.items())
        return {rank: code for rank, code in found if code is not None}

    def alive(self) -> dict[int, int]:
        """The process ids of those that run."""
        ended = self.exit_codes()
        return {rank: each.pid for rank, each in self.ranks.items() if rank not in ended}

    def final_exit_codes(self) -> dict[int, int]:
        """`exit_codes`, with those of ranks that are dying now: one that complains of a lost peer
        can be dead first."""
        deadline = time.monotonic() + KILL_TIMEOUT
        while any(map(is_dying, self.alive().values())) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.exit_codes()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that runs."""
        for pid in self.alive().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def show_output(self) -> None:
        """Shows what rank 0 has printed since the last time."""
        if self._shown is not None:
            self._shown.show(sys.stderr if os.isatty(1) else sys.stdout)

    def error_report(self, rank: int) -> ErrorReport | None:
        """What a rank left to say."""
        return read_error_report(self._error_file(rank))

    def stack_file(self, rank: int) -> Path:
        return self.logs / f"stack-{rank}.txt"

    def close(self) -> None:
        """Ends whoever still runs, at once, and with them what they have started."""
        for process in self.ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.ranks.values():
            process.wait(timeout=KILL_TIMEOUT)
        self.heartbeats.close()
        self.show_output()
        if self._shown is not None:
            self._shown.close()

    def _start(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 and os.isatty(1) else log,
                stderr=None if rank == 0 and os.isatty(2) else log,
                start_new_session=True,
                pass_fds=(self.heartbeats.file,),
            )

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def _error_file(self, rank: int) -> Path:
        return self.logs / f"error-{rank}.json"

    def _environment(self, rank: int, assignment: Assignment, threads: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - assignment.ranks.start),
            "WORLD_SIZE": str(assignment.world),
            "LOCAL_WORLD_SIZE": str(len(assignment.ranks)),
            "MASTER_ADDR": assignment.head,
            "MASTER_PORT": str(assignment.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: no rank opens another
            "TORCHELASTIC_RESTART_COUNT": str(assignment.attempt),
            "TORCHELASTIC_RUN_ID": "ranks",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",  # a log shows what a rank printed before it died
            **socket_environment(assignment.interface),
            "TOKENIZERS_PARALLELISM": "false",
            **torch_environment(os.environ),
            LAUNCHER_PID: str(os.getpid()),
            HEARTBEAT_FD: str(self.heartbeats.file),
            STACK_FILE: str(self.stack_file(rank)),
            STORE_FILE: assignment.store_file,
            ERROR_FILE: str(self._error_file(rank)),
        }
