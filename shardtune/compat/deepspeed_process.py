"""DeepSpeed in a process: the right device, no compiler at startup, no chatter, no `F.linear`."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from shardtune.compat.versioned_change import TargetChanged, change


def choose_accelerator(device: str, local_rank: int) -> None:
    """The environment that DeepSpeed reads, once, when it is imported."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", str(local_rank))  # zero.Init looks for it


def quiet_deepspeed() -> None:
    """Errors only; and torch renamed what DeepSpeed calls for every message that it sends."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", r"`torch.distributed.(all_gather_into|reduce_scatter)_tensor`", FutureWarning
    )


@change("deepspeed", since="0.19", before="0.21", lost="half a minute of compiling on first use")
def leave_out_shm_op(deepspeed: Any) -> None:
    """An all-reduce for inference on CPUs, which is compiled on first use."""
    known = deepspeed.ops.__compatible_ops__
    if "deepspeed_shm_comm" not in known:
        raise TargetChanged("deepspeed.ops knows no deepspeed_shm_comm")
    known["deepspeed_shm_comm"] = False


def kept_linear() -> Any:
    """`F.linear` as it is now: ZeRO-3 puts its own in its place, for the whole process."""
    from torch.nn import functional

    return functional.linear


def restore_linear(linear: Any) -> None:
    """Puts `F.linear` back."""
    from torch.nn import functional

    functional.linear = linear
