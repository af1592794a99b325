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
from typing import IO

from shardtune.core.heartbeat import Heartbeats
from shardtune.core.network import socket_environment
from shardtune.launch import HEARTBEAT_FD, LAUNCHER_PID, STACK_FILE
from shardtune.launch.error_file import ERROR_FILE, ErrorReport, read_error_report
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
    """Where the store is through which they find each other; a launcher keeps it."""
    interface: str
    attempt: int
    """Keeps what was written in the store in an earlier attempt apart."""


class Workers:
    """The ranks of one attempt. `logs` gets what they print and, at need, their stacks."""

    def __init__(
        self, command: Sequence[str], assignment: Assignment, threads: int, logs: Path
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.heartbeats = Heartbeats(assignment.world)
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

    def _start(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        output: IO[bytes] | None = None  # rank 0 speaks to the person
        if rank > 0:
            output = (self.logs / f"rank-{rank}.log").open("wb")
        with output or contextlib.nullcontext():
            return subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(self.heartbeats.file,),
            )

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
            **socket_environment(assignment.interface),
            "TOKENIZERS_PARALLELISM": "false",
            **torch_environment(os.environ),
            LAUNCHER_PID: str(os.getpid()),
            HEARTBEAT_FD: str(self.heartbeats.file),
            STACK_FILE: str(self.stack_file(rank)),
            ERROR_FILE: str(self._error_file(rank)),
        }
