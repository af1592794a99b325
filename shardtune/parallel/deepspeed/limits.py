"""What DeepSpeed can't do: at all, on so many ranks, or on this machine."""

from __future__ import annotations

from ctypes.util import find_library
from importlib.util import find_spec

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
        fact = f"stage {zero.stage} keeps whole weights on every rank; this acts on divided ones"
        refuse(key, fact, "set stage: 3, or leave it out")
    if optimizer.device != "none" and zero.stage == 0:
        fact = "stage 0 has no divided optimizer states to move"
        refuse("offload_optimizer.device", fact, "set stage: 1 or higher")
    if optimizer.device == "nvme" and zero.stage in (1, 2):
        # DeepSpeed takes it and keeps the states in CPU memory, without a word.
        fact = f"stage {zero.stage} can't put optimizer states into files"
        refuse("offload_optimizer.device", fact, "set stage: 3, or device: cpu")
    others = {
        "use_multi_rank_bucket_allreduce": zero.use_multi_rank_bucket_allreduce is True,
        "reduce_scatter": zero.reduce_scatter is False,
    }
    for key in (key for key, used in others.items() if used and zero.stage > 0):
        fact = "all ranks would get what one of them needs: twice the bytes of a reduction"
        refuse(key, fact, "leave it out; each rank is sent its own share")
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
        fix = "set train.precision: bf16 or fp32, or run on a GPU"
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
        if getattr(zero, key).device == "nvme" and find_library("aio") is None:
            fact = "nvme needs libaio, which isn't installed here"
            fix = "apt-get install libaio-dev, or set device: cpu"
            problems.append(Problem(f"{PLACE}.{key}.device", fact, fix))
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
