"""Whole runs on real ranks, forked from a server that has torch imported, and killed on demand."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtune.config.job import Job
from tests.ranks import _CONTEXT

TIMEOUT = 240


def train_on(
    ranks: int, job: Job, *, resume: bool = False, until: Callable[[], bool] | None = None
) -> bool:
    """Trains; kills all ranks as soon as `until` is true. Returns whether it did."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    errors = _CONTEXT.Queue()
    cache = os.environ["XDG_CACHE_HOME"]  # the server that forks knows nothing of it
    processes = [
        _CONTEXT.Process(
            target=_rank, args=(n, ranks, port, job.model_dump_json(), resume, errors, cache)
        )
        for n in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT
    try:
        while any(process.is_alive() for process in processes):
            if until is not None and until():
                return True
            if not errors.empty():
                raise AssertionError(errors.get())
            assert time.monotonic() < deadline, "the ranks hang"
            time.sleep(0.01)
        if not errors.empty():
            raise AssertionError(errors.get())
        assert all(process.exitcode == 0 for process in processes)
        return False
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def lines(path: Path) -> list[dict[str, Any]]:
    """What a log says, but for a line that isn't complete."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def _rank(
    rank: int, ranks: int, port: int, job: str, resume: bool, errors: Any, cache: str
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        XDG_CACHE_HOME=cache,
    )
    os.setsid()  # a signal for the tests is none for the ranks
    try:
        from shardtune.train import train

        train(Job.model_validate_json(job), resume=resume)
    except BaseException:
        errors.put(f"rank {rank}:\n{traceback.format_exc()}")
        raise
