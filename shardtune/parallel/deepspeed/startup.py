"""Brings DeepSpeed up in a process: the right device, no compiler, no chatter."""

from __future__ import annotations

from typing import Any

from shardtune.compat.deepspeed_process import (
    choose_accelerator,
    leave_out_shm_op,
    quiet_deepspeed,
)
from shardtune.core.world import World
from shardtune.errors import JobError, Problem
from shardtune.parallel.deepspeed.jit_build_locks import clear_dead_builds
from shardtune.parallel.single_rank_group import ensure_process_group


def start(world: World) -> Any:
    """The module `deepspeed`, ready for `world`."""
    choose_accelerator(world.device, world.local_rank)
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        fact, fix = "deepspeed is not installed", "pip install 'shardtune[deepspeed]'"
        raise JobError(Problem("strategy.type", fact, fix)) from None

    quiet_deepspeed()
    if world.device == "cpu":
        leave_out_shm_op(deepspeed)
    clear_dead_builds()
    ensure_process_group(world)
    deepspeed.init_distributed(
        dist_backend="gloo" if world.device == "cpu" else "nccl",
        auto_mpi_discovery=False,
        verbose=False,
        dist_init_required=False,
    )
    return deepspeed


def end_single_rank_group() -> None:
    """Destroys the process group of a single rank by DeepSpeed, which has others made of it: a
    later engine of this process would find those otherwise."""
    from deepspeed import comm

    comm.destroy_process_group()


def require_async_io(deepspeed: Any) -> None:
    """Refuses `nvme` where DeepSpeed can't build what reads and writes its files."""
    builder = deepspeed.accelerator.get_accelerator().create_op_builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible(verbose=False):
        place = "strategy.zero_optimization"
        fact = "device: nvme needs libaio, a C++ compiler and ninja; DeepSpeed can't find them all"
        fix = "apt-get install libaio-dev g++ ninja-build, or set device: cpu"
        raise JobError(Problem(place, fact, fix))
