"""An MLP's activation between its products, with the adapters on both sides of it.

`silu(gate) * up` passes over five times the hidden size. What LoRA adds to gate and up, what the
next layer's adapter makes of the result, and in the backward pass what goes back to the first
adapters: all of it reads the same numbers, so it is done while they are there. A GPU's compiler
doesn't join products with small operations this way; here it is a kernel for each direction. On
other machines the same is done step by step.

Rows are tokens. `y` holds gate and up side by side, without what LoRA adds: that is
`narrow @ up.T`, where `up` holds both matrices, each with columns of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None


@torch.library.custom_op("shardtune::gated", mutates_args=())
def gated(y: Tensor, narrow: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The activation, and what the next layer's `down` makes of it."""
    if not _on_gpu(y):
        gate, other = (y + narrow @ up.t()).chunk(2, dim=1)
        result = functional.silu(gate) * other
        return result, result @ down.t()
    rows, width = y.shape
    result = y.new_empty(rows, width // 2)
    after = y.new_empty(rows, len(down))
    _launch(_forward, rows, (y, narrow, up, down, result, after), width, narrow, down)
    return result, after


@gated.register_fake
def _(y: Tensor, narrow: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = y.shape
    return y.new_empty(rows, width // 2), y.new_empty(rows, down.shape[0])


@torch.library.custom_op("shardtune::gated_back", mutates_args=())
def gated_back(
    gradient: Tensor, y: Tensor, narrow: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `y` and `narrow`, and the activation once more."""
    if not _on_gpu(y):
        gate, other = (y + narrow @ up.t()).chunk(2, dim=1)
        steep = torch.sigmoid(gate.float())
        smooth = gate.float() * steep
        to_gate = gradient * other * (steep + smooth * (1 - steep))
        to_y = torch.cat([to_gate, gradient * smooth], dim=1).to(y.dtype)
        return to_y, (smooth * other).to(y.dtype), to_y @ up
    rows, width = y.shape
    to_y, result, to_narrow = (torch.empty_like(each) for each in (y, gradient, narrow))
    given = (y, narrow, up, gradient, to_y, result, to_narrow)
    _launch(_backward, rows, given, width, narrow)
    return to_y, result, to_narrow


@gated_back.register_fake
def _(gradient: Tensor, y: Tensor, narrow: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(gradient), torch.empty_like(narrow)


def _on_gpu(y: Tensor) -> bool:
    """fp32 goes step by step: the matrix unit would round it."""
    return y.is_cuda and triton is not None and y.dtype != torch.float32


def _launch(
    kernel: Any, rows: int, tensors: tuple[Tensor, ...], width: int, *small: Tensor
) -> None:
    """One program for some rows: what is summed up over columns then stays in registers."""
    ranks = (small[0].shape[1] // 2, *(len(each) for each in small[1:]))
    padded = [max(16, triton.next_power_of_2(rank)) for rank in ranks]  # the least it multiplies
    kernel[lambda chosen: (triton.cdiv(rows, chosen["BM"]),)](
        *tensors, rows, width // 2, *ranks, *padded
    )


def _forward_kernel(  # type: ignore[no-untyped-def]
    y, narrow, up, down, result, after, rows, half, rank, next_rank,
    R: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    r, n, c = tl.arange(0, R), tl.arange(0, N), tl.arange(0, BN)
    here = row < rows
    some = narrow + row[:, None] * (2 * rank) + r[None, :]
    ranked = here[:, None] & (r[None, :] < rank)
    for_gate = tl.load(some, mask=ranked, other=0.0)
    for_other = tl.load(some + rank, mask=ranked, other=0.0)
    total = tl.zeros((BM, N), dtype=tl.float32)
    for begin in range(0, half, BN):
        column = begin + c
        inside = here[:, None] & (column[None, :] < half)
        place = y + row[:, None] * (2 * half) + column[None, :]
        # Both matrices of `up`: rows of gate with the first columns, the others with the last.
        matrix = up + column[None, :] * (2 * rank) + r[:, None]
        wanted = (column[None, :] < half) & (r[:, None] < rank)
        to_gate = tl.load(matrix, mask=wanted, other=0.0)
        to_other = tl.load(matrix + half * (2 * rank) + rank, mask=wanted, other=0.0)
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.dot(for_gate, to_gate)
        other = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
        other += tl.dot(for_other, to_other)
        value = (gate * tl.sigmoid(gate) * other).to(result.dtype.element_ty)
        tl.store(result + row[:, None] * half + column[None, :], value, mask=inside)
        last = down + n[None, :] * half + column[:, None]
        kept = (n[None, :] < next_rank) & (column[:, None] < half)
        total += tl.dot(value, tl.load(last, mask=kept, other=0.0))
    end = after + row[:, None] * next_rank + n[None, :]
    tl.store(end, total.to(after.dtype.element_ty), mask=here[:, None] & (n[None, :] < next_rank))


def _backward_kernel(  # type: ignore[no-untyped-def]
    y, narrow, up, gradient, to_y, result, to_narrow, rows, half, rank,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    r, c = tl.arange(0, R), tl.arange(0, BN)
    here = row < rows
    some = row[:, None] * (2 * rank) + r[None, :]
    ranked = here[:, None] & (r[None, :] < rank)
    for_gate = tl.load(narrow + some, mask=ranked, other=0.0)
    for_other = tl.load(narrow + some + rank, mask=ranked, other=0.0)
    back_gate = tl.zeros((BM, R), dtype=tl.float32)
    back_other = tl.zeros((BM, R), dtype=tl.float32)
    for begin in range(0, half, BN):
        column = begin + c
        inside = here[:, None] & (column[None, :] < half)
        place = row[:, None] * (2 * half) + column[None, :]
        matrix = up + column[:, None] * (2 * rank) + r[None, :]
        wanted = (column[:, None] < half) & (r[None, :] < rank)
        to_gate = tl.load(matrix, mask=wanted, other=0.0)
        to_other = tl.load(matrix + half * (2 * rank) + rank, mask=wanted, other=0.0)
        gate = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        gate += tl.dot(for_gate, tl.trans(to_gate))
        other = tl.load(y + place + half, mask=inside, other=0.0).to(tl.float32)
        other += tl.dot(for_other, tl.trans(to_other))
        narrower = row[:, None] * half + column[None, :]
        incoming = tl.load(gradient + narrower, mask=inside, other=0.0).to(tl.float32)
        steep = tl.sigmoid(gate)
        smooth = gate * steep
        kind = to_y.dtype.element_ty
        tl.store(result + narrower, (smooth * other).to(kind), mask=inside)
        along_gate = (incoming * other * (steep + smooth * (1 - steep))).to(kind)
        along_other = (incoming * smooth).to(kind)
        tl.store(to_y + place, along_gate, mask=inside)
        tl.store(to_y + place + half, along_other, mask=inside)
        back_gate += tl.dot(along_gate, to_gate)
        back_other += tl.dot(along_other, to_other)
    tl.store(to_narrow + some, back_gate.to(to_narrow.dtype.element_ty), mask=ranked)
    tl.store(to_narrow + some + rank, back_other.to(to_narrow.dtype.element_ty), mask=ranked)


def _tuned(kernel: Any) -> Any:
    """Compiled for the sizes of tiles that are fastest on this GPU, found when first used."""
    if triton is None:
        return None
    tiles = ((32, 128, 4, 2), (32, 128, 8, 3), (16, 256, 4, 3), (64, 64, 4, 3))
    configs = [
        triton.Config({"BM": rows, "BN": columns}, num_warps=warps, num_stages=stages)
        for rows, columns, warps, stages in tiles
    ]
    return triton.autotune(configs, key=["half", "R"])(triton.jit(kernel))


_forward, _backward = _tuned(_forward_kernel), _tuned(_backward_kernel)
