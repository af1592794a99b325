"""An MLP's activation between its products, with the adapters on both sides of it.

`silu(gate) * up` passes over five times the hidden size. What LoRA adds to gate and up, what the
next layer's adapter makes of the result, and in the backward pass what goes back to the first
adapters: all of it reads the same numbers, so it is done while they are there. A GPU's compiler
doesn't join products with small operations this way; here it is a kernel for each direction. On
other machines the same is done step by step.

Rows are tokens. `y` holds gate and up side by side, without what LoRA adds: that is
`narrow @ up.T`, where `up` holds both matrices, each with columns of its own. In the same way the
incoming gradient is without what goes back through the next layer's adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_RANK = 64
SPLITS = 8
"""Programs that share a row. What each of them has summed up is added afterwards."""

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None


@torch.library.custom_op("shardtune::gated", mutates_args=())
def gated(y: Tensor, narrow: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The activation, and what the next layer's `down` makes of it."""
    if not _on_gpu(y, narrow.shape[1] // 2, len(down)):
        gate, other = (y + narrow @ up.t()).chunk(2, dim=1)
        result = functional.silu(gate) * other
        return result, result @ down.t()
    rows, half = len(y), y.shape[1] // 2
    result = y.new_empty(rows, half)
    sums = y.new_empty(SPLITS, rows, len(down), dtype=torch.float32)
    given = (y, narrow, up, down, result, sums)
    _launch(_forward, given, rows, half, narrow.shape[1] // 2, len(down))
    return result, sums.sum(0).to(y.dtype)


@gated.register_fake
def _(y: Tensor, narrow: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = y.shape
    return y.new_empty(rows, width // 2), y.new_empty(rows, down.shape[0])


@torch.library.custom_op("shardtune::gated_back", mutates_args=())
def gated_back(
    gradient: Tensor, last: Tensor, down: Tensor, y: Tensor, narrow: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `y` and `narrow`, and the activation once more. What comes in is `gradient`
    and `last @ down`."""
    if not _on_gpu(y, narrow.shape[1] // 2, len(down)):
        incoming = gradient + last @ down
        gate, other = (y + narrow @ up.t()).chunk(2, dim=1)
        steep = torch.sigmoid(gate.float())
        smooth = gate.float() * steep
        to_gate = incoming * other * (steep + smooth * (1 - steep))
        to_y = torch.cat([to_gate, incoming * smooth], dim=1).to(y.dtype)
        return to_y, (smooth * other).to(y.dtype), to_y @ up
    rows, half = gradient.shape
    to_y, result = torch.empty_like(y), torch.empty_like(gradient)
    sums = y.new_empty(SPLITS, rows, narrow.shape[1], dtype=torch.float32)
    given = (y, narrow, up, gradient, last, down, to_y, result, sums)
    _launch(_backward, given, rows, half, narrow.shape[1] // 2, len(down))
    return to_y, result, sums.sum(0).to(y.dtype)


@gated_back.register_fake
def _(
    gradient: Tensor, last: Tensor, down: Tensor, y: Tensor, narrow: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(gradient), torch.empty_like(narrow)


def _on_gpu(y: Tensor, *ranks: int) -> bool:
    """fp32 goes step by step, because the matrix unit would round it; so do ranks of which a tile
    would not fit into a processor's own memory."""
    known = y.is_cuda and triton is not None and y.dtype != torch.float32
    return known and max(ranks) <= LARGEST_RANK


def _launch(kernel: Any, given: tuple[Tensor, ...], rows: int, half: int, *ranks: int) -> None:
    padded = [max(16, triton.next_power_of_2(rank)) for rank in ranks]  # the least it multiplies
    kernel[lambda chosen: (triton.cdiv(rows, chosen["BM"]), SPLITS)](
        *given, rows, half, *ranks, rows.bit_length(), *padded, SPLITS
    )


# 2 ** (x * 1.4427) is e ** x, for fewer instructions than the latter takes.
# Addresses are a 64-bit number for the program and small ones for its tile: a 64-bit address for
# each number would take half of the registers.


def _forward_kernel(  # type: ignore[no-untyped-def]
    y, narrow, up, down, result, sums, rows, half, rank, next_rank, many,
    R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    begin_row = tl.program_id(0).to(tl.int64) * BM
    m, r, n, c = tl.arange(0, BM), tl.arange(0, R), tl.arange(0, N), tl.arange(0, BN)
    here = m < rows - begin_row
    some = narrow + begin_row * (2 * rank) + (m[:, None] * (2 * rank) + r[None, :])
    ranked = here[:, None] & (r[None, :] < rank)
    for_gate = tl.load(some, mask=ranked, other=0.0)
    for_other = tl.load(some + rank, mask=ranked, other=0.0)
    total = tl.zeros((BM, N), dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(half, S), BN) * BN
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, half)
    gates = y + begin_row * (2 * half)
    others = gates + half
    results = result + begin_row * half
    inside = here[:, None] & (first + c[None, :] < end)
    tile = m[:, None] * (2 * half) + (first + c)[None, :]
    next_gate = tl.load(gates + tile, mask=inside, other=0.0)
    next_other = tl.load(others + tile, mask=inside, other=0.0)
    for begin in range(first, end, BN):
        column = begin + c
        gate, other = next_gate.to(tl.float32), next_other.to(tl.float32)
        # What the next round needs is asked for before this one computes.
        ahead = here[:, None] & (column[None, :] + BN < end)
        tile += BN
        next_gate = tl.load(gates + tile, mask=ahead, other=0.0)
        next_other = tl.load(others + tile, mask=ahead, other=0.0)
        # Both matrices of `up`: rows of gate with the first columns, the others with the last.
        matrix = column[None, :] * (2 * rank) + r[:, None]
        wanted = (column[None, :] < end) & (r[:, None] < rank)
        to_gate = tl.load(up + matrix, mask=wanted, other=0.0)
        to_other = tl.load(up + half * (2 * rank) + rank + matrix, mask=wanted, other=0.0)
        gate += tl.dot(for_gate, to_gate)
        other += tl.dot(for_other, to_other)
        value = (gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * other).to(
            result.dtype.element_ty
        )
        inside = here[:, None] & (column[None, :] < end)
        tl.store(results + (m[:, None] * half + column[None, :]), value, mask=inside)
        kept = (n[None, :] < next_rank) & (column[:, None] < end)
        last = tl.load(down + (n[None, :] * half + column[:, None]), mask=kept, other=0.0)
        total += tl.dot(value, last)
    place = sums + (tl.program_id(1) * rows + begin_row) * next_rank
    kept = here[:, None] & (n[None, :] < next_rank)
    tl.store(place + (m[:, None] * next_rank + n[None, :]), total, mask=kept)


def _backward_kernel(  # type: ignore[no-untyped-def]
    y, narrow, up, gradient, last, down, to_y, result, sums, rows, half, rank, next_rank, many,
    R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    begin_row = tl.program_id(0).to(tl.int64) * BM
    m, r, n, c = tl.arange(0, BM), tl.arange(0, R), tl.arange(0, N), tl.arange(0, BN)
    here = m < rows - begin_row
    some = narrow + begin_row * (2 * rank) + (m[:, None] * (2 * rank) + r[None, :])
    ranked = here[:, None] & (r[None, :] < rank)
    for_gate = tl.load(some, mask=ranked, other=0.0)
    for_other = tl.load(some + rank, mask=ranked, other=0.0)
    ended = here[:, None] & (n[None, :] < next_rank)
    lasts = last + begin_row * next_rank + (m[:, None] * next_rank + n[None, :])
    from_last = tl.load(lasts, mask=ended, other=0.0)
    back_gate = tl.zeros((BM, R), dtype=tl.float32)
    back_other = tl.zeros((BM, R), dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(half, S), BN) * BN
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, half)
    gates, incomings = y + begin_row * (2 * half), gradient + begin_row * half
    others = gates + half
    to_gates, results = to_y + begin_row * (2 * half), result + begin_row * half
    to_others = to_gates + half
    kind = to_y.dtype.element_ty
    inside = here[:, None] & (first + c[None, :] < end)
    tile = m[:, None] * (2 * half) + (first + c)[None, :]
    short = m[:, None] * half + (first + c)[None, :]
    next_gate = tl.load(gates + tile, mask=inside, other=0.0)
    next_other = tl.load(others + tile, mask=inside, other=0.0)
    next_incoming = tl.load(incomings + short, mask=inside, other=0.0)
    for begin in range(first, end, BN):
        column = begin + c
        inside = here[:, None] & (column[None, :] < end)
        gate, other = next_gate.to(tl.float32), next_other.to(tl.float32)
        incoming = next_incoming.to(tl.float32)
        ahead = here[:, None] & (column[None, :] + BN < end)
        next_gate = tl.load(gates + tile + BN, mask=ahead, other=0.0)
        next_other = tl.load(others + tile + BN, mask=ahead, other=0.0)
        next_incoming = tl.load(incomings + short + BN, mask=ahead, other=0.0)
        matrix = column[:, None] * (2 * rank) + r[None, :]
        wanted = (column[:, None] < end) & (r[None, :] < rank)
        to_gate = tl.load(up + matrix, mask=wanted, other=0.0)
        to_other = tl.load(up + half * (2 * rank) + rank + matrix, mask=wanted, other=0.0)
        kept = (n[:, None] < next_rank) & (column[None, :] < end)
        back = tl.load(down + (n[:, None] * half + column[None, :]), mask=kept, other=0.0)
        gate += tl.dot(for_gate, tl.trans(to_gate))
        other += tl.dot(for_other, tl.trans(to_other))
        incoming += tl.dot(from_last, back)
        steep = 1.0 / (1.0 + tl.exp2(gate * -1.4426950408889634))
        smooth = gate * steep
        tl.store(results + short, (smooth * other).to(kind), mask=inside)
        along_gate = (incoming * other * (steep + smooth * (1 - steep))).to(kind)
        along_other = (incoming * smooth).to(kind)
        tl.store(to_gates + tile, along_gate, mask=inside)
        tl.store(to_others + tile, along_other, mask=inside)
        back_gate += tl.dot(along_gate, to_gate)
        back_other += tl.dot(along_other, to_other)
        tile += BN
        short += BN
    place = sums + (tl.program_id(1) * rows + begin_row) * (2 * rank)
    tile = m[:, None] * (2 * rank) + r[None, :]
    tl.store(place + tile, back_gate, mask=ranked)
    tl.store(place + rank + tile, back_other, mask=ranked)


def _tuned(kernel: Any) -> Any:
    """Compiled for the sizes of tiles that are fastest on this GPU, found when first used; anew for
    twice as many rows, because a short run before training would decide for all of it. A warp has
    sixteen rows: with fewer, warps would compute each other's numbers once more."""
    if triton is None:
        return None
    tiles = ((64, 32, 4), (128, 32, 8), (32, 32, 2), (64, 64, 4), (32, 64, 2))
    configs = [
        triton.Config({"BM": rows, "BN": columns}, num_warps=warps, num_stages=1)
        for rows, columns, warps in tiles
    ]
    return triton.autotune(configs, key=["half", "R", "many"])(triton.jit(kernel))


_forward, _backward = _tuned(_forward_kernel), _tuned(_backward_kernel)
