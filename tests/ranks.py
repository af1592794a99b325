"""Runs a function on several real gloo ranks.

Ranks are forked from a server process that has torch and transformers imported already, so a test
pays a fraction of a second for them, not their imports. Where they hang, the failure shows what
each of them was doing.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from shardtune.core.world import World

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])
TIMEOUT = 240  # seconds without an answer of any rank


def on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """`function(world, *arguments)` on each rank; returns what each one returned, by rank."""
    _serve()
    answers = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(
                target=_rank,
                args=(rank, ranks, Path(folder), timeout, answers, function, arguments),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            found: dict[int, Any] = {}
            for _ in processes:
                try:
                    rank, answer, error = answers.get(timeout=timeout)
                except queue.Empty:
                    silent = [rank for rank in range(ranks) if rank not in found]
                    raise AssertionError(_hang(Path(folder), silent, timeout)) from None
                if error:
                    raise AssertionError(f"rank {rank} failed:\n{error}")
                found[rank] = answer
        finally:
            for process in processes:
                process.join(timeout=10 if len(found) == ranks else 0.1)
                process.kill()
                process.join()
    return [found[rank] for rank in range(ranks)]


def _serve() -> None:
    """Starts the server, unless it runs. What its ranks free goes back to the system at once: on
    ARM torch's allocator would wait, for as long as the machine is busy, and nobody could say what
    a rank has taken at most."""
    with pytest.MonkeyPatch.context() as here:
        here.setenv("MIMALLOC_PURGE_DELAY", "0")
        forkserver.ensure_running()


def _hang(folder: Path, silent: list[int], timeout: float) -> str:
    """Where each rank stood that has not answered."""
    files = {rank: _stacks(folder, rank) for rank in silent}
    stacks = [f"rank {rank}:\n{file.read_text()}" for rank, file in files.items() if file.exists()]
    return "\n".join([f"ranks {silent} gave no answer in {timeout} s", *stacks])


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def _rank(
    rank: int,
    ranks: int,
    folder: Path,
    timeout: float,
    answers: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    stacks = _stacks(folder, rank).open("w")
    faulthandler.dump_traceback_later(0.6 * timeout, file=stacks)  # well before we are given up
    try:
        if ranks > 1:
            store = dist.FileStore(str(folder / "store"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        answer = function(World(rank, ranks, rank), *arguments)
        if ranks > 1:
            dist.destroy_process_group()
        answers.put((rank, answer, ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
