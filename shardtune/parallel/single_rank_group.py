"""A process group for a run of one rank: libraries that divide a model ask for one even so."""

from __future__ import annotations

import torch.distributed as dist

from shardtune.core.world import World


def ensure_process_group(world: World) -> None:
    """Makes a group where there is none, which is so with one rank only. By itself torch would look
    for the other ranks at an address in the environment, where nobody answers. Whoever has joined
    the ranks destroys it at the end of the run (`launch/process_group.py`)."""
    if dist.is_initialized():
        return
    assert world.size == 1
    backend = "gloo" if world.device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
