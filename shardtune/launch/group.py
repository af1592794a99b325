"""The processes of one attempt at a run: started together, ended together.

Each is in a session of its own, so that Ctrl-C reaches only the launcher, and so that whatever a
rank has started can be ended with it. The store through which they find each other is ours, new for
each attempt, and listens on the loopback address only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardtune.core.pulse import Pulses
from shardtune.launch import PULSE, STACK, STARTED_BY_US
from shardtune.launch.last_words import ERROR_FILE, LastWords, read_last_words

LOOPBACK = "127.0.0.1"
DEATH = 10.0  # seconds in which the kernel has to have ended a killed process


class Group:
    """The ranks of one attempt. `logs` gets what they print and, at need, their stacks."""

    def __init__(self, command: Sequence[str], processes: int, threads: int, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.pulses = Pulses(processes)
        self._store, port = _open_store()
        self.ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(processes):
                environment = os.environ | self._environment(rank, processes, threads, port)
                self.ranks.append(self._start(rank, command, environment))
        except BaseException:
            self.close()
            raise

    def codes(self) -> dict[int, int]:
        """How those ended that have ended: an exit code, or the number of a signal, negative."""
        found = ((rank, process.poll()) for rank, process in enumerate(self.ranks))
        return {rank: code for rank, code in found if code is not None}

    def alive(self) -> dict[int, int]:
        """The process ids of those that run."""
        ended = self.codes()
        return {rank: each.pid for rank, each in enumerate(self.ranks) if rank not in ended}

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
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.ranks:
            process.wait(timeout=DEATH)
        self._store = None
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

    def _environment(self, rank: int, processes: int, threads: int, port: int) -> dict[str, str]:
        interface = "lo" if sys.platform.startswith("linux") else "lo0"
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: no rank opens another
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "ranks",
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "TOKENIZERS_PARALLELISM": "false",
            STARTED_BY_US: str(os.getpid()),
            PULSE: str(self.pulses.file),
            STACK: str(self.stack_file(rank)),
            ERROR_FILE: str(self._error_file(rank)),
        }


def _open_store() -> tuple[TCPStore | None, int]:
    """A store on a port that the kernel chose, so that it can't be in use."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    return store, port
