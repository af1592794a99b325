"""What DeepSpeed can't do: at all, on so many ranks, or on this machine."""

from __future__ import annotations

import os
import shutil
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from shardtune.core.setup import Precision
from shardtune.errors import Problem
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO

PLACE = "strategy.zero_optimization"


def anywhere(zero: ZeRO) -> list[Problem]:
    """What no machine makes possible."""
    optimizer, param = zero.offload_optimizer, zero.offload_param
    problems = []

    def refuse(key: str, fact: str, fix: str) -> None:
        problems.append(Problem(f"{PLACE}.{key}", fact, fix))

    needs_3 = {
        "offload_param": param.device != "none",
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": bool(zero.zero_quantized_nontrainable_weights),
        "zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    for key in (key for key, used in needs_3.items() if used and zero.stage < 3):
        fact = f"stage {zero.stage} keeps the weights whole on every rank; this needs sharded ones"
        refuse(key, fact, "set stage: 3, or leave it out")
    if optimizer.device != "none" and zero.stage == 0:
        fact = "DeepSpeed doesn't offload in stage 0: it silently keeps the states on the GPU"
        fix = "set stage: 1, which offloads the states, and shards them over several ranks"
        refuse("offload_optimizer.device", fact, fix)
    if optimizer.device == "nvme" and zero.stage in (1, 2):
        # DeepSpeed takes it and keeps the states in CPU memory, without a word.
        fact = f"stage {zero.stage} can't offload optimizer states to NVMe"
        refuse("offload_optimizer.device", fact, "set stage: 3, or device: cpu")
    if zero.use_multi_rank_bucket_allreduce and zero.stage > 0:
        fact = "it sends every gradient to all ranks, not to its owner: twice the bytes of a reduce"
        fix = "leave it out; each rank is sent its own shard"
        refuse("use_multi_rank_bucket_allreduce", fact, fix)
    if zero.reduce_scatter is False and zero.zero_quantized_gradients:
        fact = "quantized gradients are only ever reduce-scattered"
        refuse("reduce_scatter", fact, "leave it out, or set zero_quantized_gradients: false")
    for key, section in (("offload_optimizer", optimizer), ("offload_param", param)):
        if section.device == "nvme" and section.nvme_path is None:
            refuse(f"{key}.nvme_path", "is missing", "name a folder on a fast local disk")
    return problems


def on_ranks(zero: ZeRO, ranks: int) -> list[Problem]:
    """What this number of ranks makes impossible."""
    if ranks % zero.zero_hpz_partition_size == 0:
        return []
    fact = f"groups of {zero.zero_hpz_partition_size} don't divide {ranks} ranks"
    fix = "choose a divisor of the number of ranks, best the ranks of a node"
    return [Problem(f"{PLACE}.zero_hpz_partition_size", fact, fix)]


def here(zero: ZeRO, *, gpu: bool, precision: Precision) -> list[Problem]:
    """What this machine lacks."""
    problems = []
    if precision == "fp16" and not gpu and not fp16_on_this_cpu():
        fact = "DeepSpeed computes in fp16 only on CPUs with instructions for it; this one has none"
        fix = (
            "set train.precision: bf16 or fp32 (in a DeepSpeed file: fp16 `enabled`: false or "
            '"auto"), or run on a GPU'
        )
        problems.append(Problem("train.precision", fact, fix))
    quantized = {
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    for key in (key for key, used in quantized.items() if used and not gpu):
        fact = "DeepSpeed's quantized collectives are written for GPUs, and there is none here"
        problems.append(Problem(f"{PLACE}.{key}", fact, "set it to false, or run on a GPU"))
    for key in ("offload_optimizer", "offload_param"):
        if getattr(zero, key).device == "nvme":
            problems += _without_nvme(key, getattr(zero, key).nvme_path)
    return problems


def _without_nvme(key: str, folder: str | None) -> list[Problem]:
    """What keeps states from being written to files here."""
    needed = {
        "libaio": find_library("aio") is not None,
        "g++": shutil.which("g++") is not None,
        "ninja": shutil.which("ninja") is not None or find_spec("ninja") is not None,
    }
    problems = []
    missing = [name for name, there in needed.items() if not there]
    if missing:
        fact = f"nvme needs {' and '.join(missing)}, which this machine doesn't have"
        fix = "apt-get install libaio-dev g++ ninja-build, or set device: cpu"
        problems.append(Problem(f"{PLACE}.{key}.device", fact, fix))
    if folder is not None:
        path = Path(folder).absolute()
        nearest = next(each for each in (path, *path.parents) if each.exists())
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            fact = f"{folder} can't be written to: {nearest} is not a folder with write permission"
            fix = "name a folder on a fast local disk"
            problems.append(Problem(f"{PLACE}.{key}.nvme_path", fact, fix))
    return problems


def fp16_on_this_cpu() -> bool:
    """Whether DeepSpeed's own CPU accelerator says that it computes in fp16 here. That it isn't
    installed is told elsewhere."""
    if find_spec("deepspeed") is None:
        return True
    from shardtune.compat.deepspeed_process import choose_accelerator, quiet_deepspeed

    choose_accelerator("cpu", 0)
    from deepspeed.accelerator import get_accelerator

    quiet_deepspeed()
    return bool(get_accelerator().is_fp16_supported())
