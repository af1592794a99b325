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

from shardtune.core.heartbeat import Pulses
from shardtune.core.network import socket_environment
from shardtune.launch import PULSE, STACK, STARTED_BY_US
from shardtune.launch.error_file import ERROR_FILE, LastWords, read_last_words
from shardtune.launch.process_info import is_dying
from shardtune.launch.torch_env import torch_settings

DEATH = 10.0  # seconds in which the kernel has to have ended a killed process


@dataclass(frozen=True)
class Seat:
    """Where the ranks of this machine stand among all, and where they find the others."""

    ranks: range
    """Of this machine."""
    world: int
    """The number of all ranks, on all machines."""
    head: str
    port: int
    """Where the store is through which they find each other; a launcher keeps it."""
    interface: str
    attempt: int
    """Keeps what was written in the store in an earlier attempt apart."""


class Group:
    """The ranks of one attempt. `logs` gets what they print and, at need, their stacks."""

    def __init__(self, command: Sequence[str], seat: Seat, threads: int, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.pulses = Pulses(seat.world)
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in seat.ranks:
                environment = os.environ | self._environment(rank, seat, threads)
                self.ranks[rank] = self._start(rank, command, environment)
        except BaseException:
            self.close()
            raise

    def codes(self) -> dict[int, int]:
        """How those ended that have ended: an exit code, or the number of a signal, negative."""
        found = ((rank, process.poll()) for rank, process in self.ranks.items())
        return {rank: code for rank, code in found if code is not None}

    def alive(self) -> dict[int, int]:
        """The process ids of those that run."""
        ended = self.codes()
        return {rank: each.pid for rank, each in self.ranks.items() if rank not in ended}

    def settled_codes(self) -> dict[int, int]:
        """`codes`, with those that are dying now: who complains of a lost peer can be the first to
        be dead."""
        deadline = time.monotonic() + DEATH
        while any(map(is_dying, self.alive().values())) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.codes()

    def tell(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that runs."""
        for pid in self.alive().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def words(self, rank: int) -> LastWords | None:
        """What a rank left to say."""
        return read_last_words(self._error_file(rank))

    def stack_file(self, rank: int) -> Path:
        return self.logs / f"stack-{rank}.txt"

    def close(self) -> None:
        """Ends whoever still runs, at once, and with them what they have started."""
        for process in self.ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.ranks.values():
            process.wait(timeout=DEATH)
        self.pulses.close()

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
                pass_fds=(self.pulses.file,),
            )

    def _error_file(self, rank: int) -> Path:
        return self.logs / f"error-{rank}.json"

    def _environment(self, rank: int, seat: Seat, threads: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - seat.ranks.start),
            "WORLD_SIZE": str(seat.world),
            "LOCAL_WORLD_SIZE": str(len(seat.ranks)),
            "MASTER_ADDR": seat.head,
            "MASTER_PORT": str(seat.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: no rank opens another
            "TORCHELASTIC_RESTART_COUNT": str(seat.attempt),
            "TORCHELASTIC_RUN_ID": "ranks",
            "OMP_NUM_THREADS": str(threads),
            **socket_environment(seat.interface),
            "TOKENIZERS_PARALLELISM": "false",
            **torch_settings(os.environ),
            STARTED_BY_US: str(os.getpid()),
            PULSE: str(self.pulses.file),
            STACK: str(self.stack_file(rank)),
            ERROR_FILE: str(self._error_file(rank)),
        }
