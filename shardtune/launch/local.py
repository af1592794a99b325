"""Starts the ranks of a run on this machine and sees them to their end.

The processes are PyTorch's elastic ones: each in a session of its own (so that Ctrl-C reaches only
us), each leaving its traceback in a file. The store through which they find each other is ours, and
it listens on the loopback address only.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    Std,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from shardtune.errors import LaunchError, Problem
from shardtune.launch import INTERRUPTED, STARTED_BY_US
from shardtune.launch.last_words import read_last_words

LOOPBACK = "127.0.0.1"
PERIOD = 0.1  # seconds between two looks at the ranks


def run_local(command: Sequence[str], *, processes: int, threads: int, logs: Path) -> int:
    """Runs `python COMMAND...` once per rank. Returns the exit code; LaunchError if a rank died.

    The first SIGINT or SIGTERM asks the ranks to stop after their step, the second kills them.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we report ourselves
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
    context = start_processes(
        name="shardtune",
        entrypoint=sys.executable,
        args={rank: tuple(command) for rank in range(processes)},
        envs={rank: _environment(rank, processes, threads, port) for rank in range(processes)},
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs), redirects=dict.fromkeys(range(1, processes), Std.ALL)
        ),
    )
    try:
        result, signals = _see_through(context)
    finally:
        context.close(signal.SIGKILL)
        del store
    if result is None or (signals and _was_interrupted(result)):
        return INTERRUPTED
    if result.is_failed():
        raise LaunchError(_report(result, logs))
    return INTERRUPTED if signals else 0


def _environment(rank: int, processes: int, threads: int, port: int) -> dict[str, str]:
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
    }


def _see_through(context: PContext) -> tuple[RunProcsResult | None, int]:
    """Waits for the end of the ranks; None if they had to be killed."""
    signals = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1

    before = {
        number: signal.signal(number, on_signal)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    handled = 0
    try:
        while True:
            result = context.wait(timeout=0)
            if result is not None:
                return result, signals
            if signals > handled:
                handled += 1
                if handled > 1:
                    return None, signals
                print("\nstopping after this step; once more to stop at once", file=sys.stderr)
                for pid in context.pids().values():
                    os.kill(pid, signal.SIGINT)
            time.sleep(PERIOD)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _was_interrupted(result: RunProcsResult) -> bool:
    """Whether the ranks that failed did so because the signal came before they could heed it."""
    codes = {failure.exitcode for failure in result.failures.values()}
    return bool(codes) and codes <= {INTERRUPTED, -signal.SIGINT}


def _report(result: RunProcsResult, logs: Path) -> list[Problem]:
    """What the rank that failed first said about it: the others only lost their peer."""
    spoken = [
        (words, rank)
        for rank, failure in result.failures.items()
        if (words := read_last_words(Path(failure.error_file)))
    ]
    if spoken:
        words, rank = min(spoken, key=lambda item: item[0].time)
        if words.problems:
            return list(words.problems)
        fix = f"this is a fault of shardtune or of a library; the ranks' own output is in {logs}"
        return [Problem(f"rank {rank}", words.traceback, fix)]
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    how = (
        f"was killed by {signal.Signals(-failure.exitcode).name}"
        if failure.exitcode < 0
        else f"ended with exit code {failure.exitcode}"
    )
    fix = f"see the ranks' own output in {logs}"
    if failure.exitcode == -signal.SIGKILL:
        fix = "if the machine ran out of memory, lower train.micro_batch or start fewer processes"
    return [Problem(f"rank {rank}", f"{how} without a word", fix)]
