"""Brings DeepSpeed up in a process: the right device, no compiler, no chatter."""

from __future__ import annotations

import ctypes
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardtune.core.world import World
from shardtune.errors import JobError, Problem
from shardtune.parallel.deepspeed.jit_build_locks import clear_dead_builds


def start(world: World) -> Any:
    """The module `deepspeed`, ready for `world`."""
    if world.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it once, when it is imported
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # zero.Init looks for it
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        fact, fix = "deepspeed is not installed", "pip install 'shardtune[deepspeed]'"
        raise JobError(Problem("strategy.type", fact, fix)) from None

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings(  # torch renamed what DeepSpeed calls for every message it sends
        "ignore", r"`torch.distributed.(all_gather_into|reduce_scatter)_tensor`", FutureWarning
    )
    if world.device == "cpu":
        # An all-reduce for inference that is compiled on first use, for half a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    clear_dead_builds()
    if not dist.is_initialized():  # one rank; DeepSpeed wants a group even so
        backend = "gloo" if world.device == "cpu" else "cpu:gloo,cuda:nccl"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(
        dist_backend="gloo" if world.device == "cpu" else "nccl",
        auto_mpi_discovery=False,
        verbose=False,
        dist_init_required=False,
    )
    return deepspeed


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


@contextmanager
def freed_memory_goes_back() -> Iterator[None]:
    """Lets the system have the memory of a large tensor as soon as it is freed.

    At first the C library maps what is at least 128 KiB by itself. It raises that limit when such a
    tensor is freed, and from then on grows by what lies between tensors: by 20 to 60 MiB while
    DeepSpeed gathers every weight once to hang its hooks on it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, 128 << 10)
    mallopt(_TRIM_THRESHOLD, 128 << 10)
    try:
        yield
    finally:  # the highest that the library goes by itself; training uses its memory again at once
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)


def require_async_io(deepspeed: Any) -> None:
    """Refuses `nvme` where DeepSpeed can't build what reads and writes its files."""
    builder = deepspeed.accelerator.get_accelerator().create_op_builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible(verbose=False):
        place = "strategy.zero_optimization"
        fact = "device: nvme needs libaio, a C++ compiler and ninja; DeepSpeed can't find them all"
        fix = "apt-get install libaio-dev g++ ninja-build, or set device: cpu"
        raise JobError(Problem(place, fact, fix))
