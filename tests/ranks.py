"""Runs a function on several real gloo ranks.

Ranks are forked from a server process that has torch and transformers imported already, so a test
pays a fraction of a second for them, not their imports.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtune.core.world import World

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "peft"])
TIMEOUT = 240


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(world, *arguments)` on each rank; returns what each one returned, by rank."""
    answers = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            _CONTEXT.Process(
                target=_rank, args=(rank, ranks, store, answers, function, arguments), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            found: dict[int, Any] = {}
            for _ in processes:
                rank, answer, error = answers.get(timeout=TIMEOUT)
                if error:
                    raise AssertionError(f"rank {rank} failed:\n{error}")
                found[rank] = answer
        finally:
            for process in processes:
                process.join(timeout=10 if len(found) == ranks else 0.1)
                process.kill()
                process.join()
    return [found[rank] for rank in range(ranks)]


def _rank(
    rank: int,
    ranks: int,
    store: str,
    answers: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        if ranks > 1:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks
            )
        answer = function(World(rank, ranks, rank), *arguments)
        if ranks > 1:
            dist.destroy_process_group()
        answers.put((rank, answer, ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
