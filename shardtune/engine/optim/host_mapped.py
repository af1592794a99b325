"""Host-mapped memory: CPU memory that a GPU reads and writes over the bus, inside a kernel.

Nothing is copied before and after: what a kernel asks for travels when it asks, in both directions
at once. The driver's own paging (managed memory) moves whole pages when one of them is missed.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch
from torch import Tensor

from shardtune.errors import JobError, Problem


class Pages(mmap.mmap):
    """Zeroed pages for one tensor and its views, which the driver forgets before they are given
    back: what it is told of is whole pages, and addresses are used again."""

    registered_at = 0

    def __new__(cls, size: int) -> Pages:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def register(self, place: int) -> int:
        """Lets GPUs read and write here; CUDA's error, 0 if there is none."""
        failed = int(_runtime().cudaHostRegister(place, len(self), 0))
        self.registered_at = 0 if failed else place
        return failed

    def __del__(self) -> None:
        if self.registered_at and not sys.is_finalizing():
            _runtime().cudaHostUnregister(self.registered_at)


def host_mapped_zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the form of `like`, in whole pages: torch's own pinned memory is rounded up to a
    power of two."""
    try:
        made, pages = _zeros(like, dtype)
    except (RuntimeError, OSError) as error:
        raise _none(like, dtype, str(error).strip().splitlines()[0]) from error
    if like.is_cuda and pages is not None:
        with torch.cuda.device(like.device):
            failed = pages.register(made.data_ptr())
        if failed:
            raise _none(like, dtype, f"CUDA's error {failed} for memory that the GPU may read")
    return made


def _zeros(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Pages | None]:
    """And the pages it lies in, which live as long as its storage; a fake tensor has none."""
    size = like.numel() * dtype.itemsize
    if size == 0 or type(torch.empty(0, device="cpu")) is not Tensor:
        return torch.zeros(like.shape, dtype=dtype, device="cpu"), None
    pages = Pages(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    return torch.frombuffer(pages, dtype=dtype, count=like.numel()).view(like.shape), pages


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _none(like: Tensor, dtype: torch.dtype, reason: str) -> JobError:
    size = like.numel() * dtype.itemsize
    fact = f"no {size:,} bytes of CPU memory more for optimizer states: {reason}"
    fix = "free CPU memory (10 bytes a weight), raise a container's limit, or set it to false"
    return JobError(Problem("train.optimizer.paged", fact, fix))
