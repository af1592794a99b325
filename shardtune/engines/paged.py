"""Main memory that a GPU reads and writes by itself, over the bus, from inside a kernel.

Nothing is copied before and after: what a kernel asks for travels when it asks, in both directions
at once. The driver's own paging (managed memory) moves whole pages when one of them is missed.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from shardtune.errors import JobError, Problem


def in_main_memory(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the form of `like`. Of exactly that size: torch's own pinned memory is rounded up to
    a power of two."""
    made = torch.zeros(like.shape, dtype=dtype, device="cpu")
    if like.is_cuda and type(made) is Tensor:  # a fake one has no memory
        _register(made, like.device)
    return made


def _register(made: Tensor, device: torch.device) -> None:
    if not made.nbytes:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    place = made.data_ptr()
    with torch.cuda.device(device):
        failed = int(runtime.cudaHostRegister(place, made.nbytes, 0))
    if failed:
        fact = f"CUDA's error {failed}: the GPU can't be given {made.nbytes:,} bytes of main memory"
        fix = "raise the limit of locked memory (ulimit -l), or set train.optimizer.paged: false"
        raise JobError(Problem("train.optimizer.paged", fact, fix))
    weakref.finalize(made, runtime.cudaHostUnregister, place).atexit = False
