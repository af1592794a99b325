"""Host-mapped memory: CPU memory that a GPU reads and writes over the bus, inside a kernel.

Nothing is copied before and after: what a kernel asks for travels when it asks, in both directions
at once. The driver's own paging (managed memory) moves whole pages when one of them is missed.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from shardtune.errors import JobError, Problem


def host_mapped_zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the form of `like`. Of exactly that size: torch's own pinned memory is rounded up to
    a power of two."""
    try:
        made = torch.zeros(like.shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise _none(like, dtype, str(error).strip().splitlines()[0]) from error
    if like.is_cuda and type(made) is Tensor and made.nbytes:  # a fake one has no memory
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        place = made.data_ptr()
        with torch.cuda.device(like.device):
            failed = int(runtime.cudaHostRegister(place, made.nbytes, 0))
        if failed:
            raise _none(like, dtype, f"CUDA's error {failed} for memory that the GPU may read")
        weakref.finalize(made, runtime.cudaHostUnregister, place).atexit = False
    return made


def _none(like: Tensor, dtype: torch.dtype, reason: str) -> JobError:
    size = like.numel() * dtype.itemsize
    fact = f"no {size:,} bytes of CPU memory more for optimizer states: {reason}"
    fix = "free CPU memory (10 bytes a weight), raise a container's limit, or set it to false"
    return JobError(Problem("train.optimizer.paged", fact, fix))
