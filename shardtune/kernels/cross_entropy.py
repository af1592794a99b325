"""Cross-entropy of some rows of logits on a GPU, which become their own gradient.

A compiler needs a second buffer as large as the logits and passes over memory three times. Here a
row is read, normalised and overwritten by one program, while it is still in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.core.step import IGNORED

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None

_BLOCK = 8192


def available() -> bool:
    return triton is not None


def cross_entropy_in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss, and `logits` themselves with the gradient in them."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    _cross_entropy[(rows,)](
        logits, targets, losses, logits.stride(0), vocabulary, IGNORED, _BLOCK, num_warps=16
    )
    return losses.sum(), logits


def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, targets, losses, stride, vocabulary, ignored: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, block)
    largest = float("-inf")
    total = 0.0
    for begin in range(0, vocabulary, block):
        inside = begin + columns < vocabulary
        x = tl.load(here + begin + columns, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(x - above), 0)
        largest = above
    norm = largest + tl.log(total)
    counted = target != ignored
    there = tl.where(counted, target, 0)
    aim = tl.load(here + there, mask=there < vocabulary, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(counted, norm - aim, 0.0))
    tl.debug_barrier()  # `aim` has been read: it may be overwritten
    for begin in range(0, vocabulary, block):
        inside = begin + columns < vocabulary
        x = tl.load(here + begin + columns, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(x - norm) - tl.where(begin + columns == target, 1.0, 0.0)
        gradient = tl.where(counted, gradient, 0.0)
        tl.store(here + begin + columns, gradient.to(logits.dtype.element_ty), mask=inside)


_cross_entropy: Any = triton.jit(_cross_entropy_kernel) if triton is not None else None
