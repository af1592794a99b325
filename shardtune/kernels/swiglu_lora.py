"""An MLP's activation between its products, with the adapters on both sides of it.

`silu(gate) * up` passes over five times the hidden size. What LoRA adds to gate and up, what the
next layer's adapter makes of the result, and in the backward pass what goes back to the first
adapters and the gradients of all their matrices: all of it reads the same numbers, so it is done
while they are there. A GPU's compiler doesn't join products with small operations this way; here it
is a kernel for each direction. On other machines the same is done step by step.

Rows are tokens. `y` holds gate and up side by side, without what LoRA adds: gate's is made of the
first half of `narrow` and of the first half of the rows of `up`, the other's of the second halves.
In the same way the incoming gradient is without what goes back through the next layer's adapter.
What goes back comes as it is needed: the gradient of `y`, and that of `narrow` beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardtune.kernels.autotune import autotuned
from shardtune.kernels.matmul_fp32_out import matmul_fp32_out
from shardtune.kernels.stacked_linear import cat_aligned, empty_aligned

LARGEST_RANK = 64
TILE = 64
"""Columns that a program has at a time."""
SPLITS = 8
"""Programs that share a row, or a column. What each of them has summed up is added afterwards."""

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None


@torch.library.custom_op("shardtune::swiglu_lora", mutates_args=())
def swiglu_lora(y: Tensor, narrow: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The activation, and what the next layer's `down` makes of it."""
    rows, half, rank = len(y), y.shape[1] // 2, up.shape[1]
    if not _on_gpu(y, rank, len(down)):
        gate, other = _opened(y, narrow, up)
        result = functional.silu(gate) * other
        return result, result @ down.t()
    result = y.new_empty(rows, half)
    sums = y.new_empty(SPLITS, rows, len(down), dtype=torch.float32)
    given = (y, narrow, up, down, result, sums)
    _swiglu_lora[lambda chosen: (triton.cdiv(rows, chosen["BM"]), SPLITS)](
        *given, y.stride(0), narrow.stride(0), *_sizes(rows, half, rank, len(down))
    )
    return result, sums.sum(0).to(y.dtype)


@swiglu_lora.register_fake
def _(y: Tensor, narrow: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = y.shape
    return y.new_empty(rows, width // 2), y.new_empty(rows, down.shape[0])


@torch.library.custom_op("shardtune::swiglu_lora_backward", mutates_args=())
def swiglu_lora_backward(
    gradient: Tensor, last: Tensor, down: Tensor, y: Tensor, narrow: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `y` with `narrow` beside it, of `up` and of `down`; the last two in fp32.
    What comes in is `gradient` and `last @ down`."""
    (rows, half), rank = gradient.shape, up.shape[1]
    if not _on_gpu(y, rank, len(down)):
        return _back_step_by_step(gradient, last, down, y, narrow, up)
    back = empty_aligned(y, rows, 2 * half + 2 * rank)
    to_y, to_narrow = torch.split(back, [2 * half, 2 * rank], dim=1)
    # Parts of a sum are rounded as what they are sums of is: to `y`'s precision.
    sums = y.new_empty(half // TILE, rows, 2 * rank)
    to_up = y.new_empty(SPLITS, 2 * half, rank, dtype=torch.float32)
    to_down = y.new_empty(SPLITS, half, len(down), dtype=torch.float32)
    given = (y, narrow, up, gradient, last, down, to_y, sums, to_up, to_down)
    strides = (y.stride(0), narrow.stride(0), back.stride(0))
    _swiglu_lora_backward[(half // TILE, SPLITS)](
        *given, *strides, *_sizes(rows, half, rank, len(down))
    )
    to_narrow.copy_(sums.sum(0, dtype=torch.float32))
    return back, to_up.sum(0), to_down.sum(0).t().contiguous()


@swiglu_lora_backward.register_fake
def _(
    gradient: Tensor, last: Tensor, down: Tensor, y: Tensor, narrow: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_up, of_down = (torch.empty_like(each, dtype=torch.float32) for each in (up, down))
    return empty_aligned(y, y.shape[0], y.shape[1] + narrow.shape[1]), of_up, of_down


def _opened(y: Tensor, narrow: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Gate and up, with what LoRA adds to them."""
    parts = zip(narrow.chunk(2, dim=1), up.chunk(2), strict=True)
    return (y + torch.cat([some @ matrix.t() for some, matrix in parts], dim=1)).chunk(2, dim=1)


def _back_step_by_step(
    gradient: Tensor, last: Tensor, down: Tensor, y: Tensor, narrow: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    incoming = gradient + last @ down
    gate, other = _opened(y, narrow, up)
    steep = torch.sigmoid(gate.float())
    smooth = gate.float() * steep
    to_gate = incoming * other * (steep + smooth * (1 - steep))
    halves = [each.to(y.dtype) for each in (to_gate, incoming * smooth)]
    result = (smooth * other).to(y.dtype)
    to_narrow = [some @ matrix for some, matrix in zip(halves, up.chunk(2), strict=True)]
    parts = zip(halves, narrow.chunk(2, dim=1), strict=True)
    to_up = torch.cat([matmul_fp32_out(some.t(), of) for some, of in parts])
    return cat_aligned(*halves, *to_narrow), to_up, matmul_fp32_out(last.t(), result)


def _on_gpu(y: Tensor, *ranks: int) -> bool:
    """fp32 goes step by step, because the matrix unit would round it; so do ranks of which a tile
    would not fit into a processor's own memory, and widths that aren't whole tiles."""
    known = y.is_cuda and triton is not None and y.dtype != torch.float32
    return known and max(ranks) <= LARGEST_RANK and y.shape[1] % (2 * TILE) == 0


def _sizes(rows: int, half: int, *ranks: int) -> tuple[int, ...]:
    padded = [max(16, triton.next_power_of_2(rank)) for rank in ranks]  # the least it multiplies
    return rows, half, *ranks, rows.bit_length(), *padded, SPLITS, TILE


# Addresses are a 64-bit number for the program and small ones for its tile: a 64-bit address for
# each number would take half of the registers.
# Numbers of the next tile are asked for before this one is computed. Triton does that by itself
# with what is multiplied (`num_stages`), but not with what products are added to.


def _sigmoid_of(x):  # type: ignore[no-untyped-def]
    """Two instructions of the card, each right to the last bit or two; what Triton makes of the
    usual formula also looks after numbers that can't come up here, and takes twice as many."""
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


_sigmoid: Any = triton.jit(_sigmoid_of) if triton is not None else None


def _swiglu_lora_kernel(  # type: ignore[no-untyped-def]
    y, narrow, up, down, result, sums, row, narrow_row, rows, half, rank, next_rank, many,
    R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Some rows, and a share of the columns."""
    begin_row = tl.program_id(0).to(tl.int64) * BM
    m, r, n, c = tl.arange(0, BM), tl.arange(0, R), tl.arange(0, N), tl.arange(0, BN)
    here = (m < rows - begin_row)[:, None]
    some = narrow + begin_row * narrow_row + (m[:, None] * narrow_row + r[None, :])
    ranked = here & (r[None, :] < rank)
    for_gate = tl.load(some, mask=ranked, other=0.0)
    for_other = tl.load(some + rank, mask=ranked, other=0.0)
    total = tl.zeros((BM, N), dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(half, S), BN) * BN
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, half)
    gates, results = y + begin_row * row, result + begin_row * half
    tile = m[:, None] * row + (first + c)[None, :]
    any_left = here & (first < end)
    next_gate = tl.load(gates + tile, mask=any_left, other=0.0)
    next_other = tl.load(gates + half + tile, mask=any_left, other=0.0)
    for begin in range(first, end, BN):
        column = begin + c
        gate, other = next_gate.to(tl.float32), next_other.to(tl.float32)
        tile += BN
        ahead = here & (begin + BN < end)
        next_gate = tl.load(gates + tile, mask=ahead, other=0.0)
        next_other = tl.load(gates + half + tile, mask=ahead, other=0.0)
        matrix = up + (column[None, :] * rank + r[:, None])
        to_gate = tl.load(matrix, mask=r[:, None] < rank, other=0.0)
        to_other = tl.load(matrix + half * rank, mask=r[:, None] < rank, other=0.0)
        gate = tl.dot(for_gate, to_gate, gate)
        other = tl.dot(for_other, to_other, other)
        value = (gate * _sigmoid(gate) * other).to(result.dtype.element_ty)
        tl.store(results + (m[:, None] * half + column[None, :]), value, mask=here)
        kept = n[None, :] < next_rank
        last = tl.load(down + (n[None, :] * half + column[:, None]), mask=kept, other=0.0)
        total = tl.dot(value, last, total)
    place = sums + (tl.program_id(1) * rows + begin_row) * next_rank
    kept = here & (n[None, :] < next_rank)
    tl.store(place + (m[:, None] * next_rank + n[None, :]), total, mask=kept)


def _swiglu_lora_backward_kernel(  # type: ignore[no-untyped-def]
    y, narrow, up, gradient, last, down, to_y, sums, to_up, to_down, row, narrow_row, to_row,
    rows, half, rank, next_rank, many,
    R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Some columns, and a share of the rows: so the matrices are read once, and their gradients are
    summed up here."""
    m, r, n = tl.arange(0, BM), tl.arange(0, R), tl.arange(0, N)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    ranks, nexts = r[None, :] < rank, n[None, :] < next_rank
    matrix = c[:, None] * rank + r[None, :]
    to_gate = tl.load(up + matrix, mask=ranks, other=0.0)
    to_other = tl.load(up + half * rank + matrix, mask=ranks, other=0.0)
    kept = n[:, None] < next_rank
    back = tl.load(down + (n[:, None] * half + c[None, :]), mask=kept, other=0.0)
    of_gate = tl.zeros((BN, R), dtype=tl.float32)
    of_other = tl.zeros((BN, R), dtype=tl.float32)
    of_down = tl.zeros((BN, N), dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(rows, S), BM) * BM
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, rows)
    base, step = first.to(tl.int64), tl.zeros((), tl.int64) + BM
    gates, incomings = y + base * row, gradient + base * half
    to_gates = to_y + base * to_row
    narrows, lasts = narrow + base * narrow_row, last + base * next_rank
    place = sums + (tl.program_id(0).to(tl.int64) * rows + base) * (2 * rank)
    tile = m[:, None] * row + c[None, :]
    to_tile = m[:, None] * to_row + c[None, :]
    short = m[:, None] * half + c[None, :]
    small = m[:, None] * narrow_row + r[None, :]
    summed = m[:, None] * (2 * rank) + r[None, :]
    smaller = m[:, None] * next_rank + n[None, :]
    kind = to_y.dtype.element_ty
    here = (first + m < end)[:, None]
    next_gate = tl.load(gates + tile, mask=here, other=0.0)
    next_other = tl.load(gates + half + tile, mask=here, other=0.0)
    next_incoming = tl.load(incomings + short, mask=here, other=0.0)
    for begin in range(first, end, BM):
        here = (begin + m < end)[:, None]
        gate, other = next_gate.to(tl.float32), next_other.to(tl.float32)
        incoming = next_incoming.to(tl.float32)
        gates += step * row
        incomings += step * half
        ahead = (begin + BM + m < end)[:, None]
        next_gate = tl.load(gates + tile, mask=ahead, other=0.0)
        next_other = tl.load(gates + half + tile, mask=ahead, other=0.0)
        next_incoming = tl.load(incomings + short, mask=ahead, other=0.0)
        for_gate = tl.load(narrows + small, mask=here & ranks, other=0.0)
        for_other = tl.load(narrows + rank + small, mask=here & ranks, other=0.0)
        from_last = tl.load(lasts + smaller, mask=here & nexts, other=0.0)
        gate = tl.dot(for_gate, tl.trans(to_gate), gate)
        other = tl.dot(for_other, tl.trans(to_other), other)
        incoming = tl.dot(from_last, back, incoming)
        steep = _sigmoid(gate)
        smooth = gate * steep
        value = (smooth * other).to(kind)
        along_gate = (incoming * other * (steep + smooth * (1 - steep))).to(kind)
        along_other = (incoming * smooth).to(kind)
        tl.store(to_gates + to_tile, along_gate, mask=here)
        tl.store(to_gates + half + to_tile, along_other, mask=here)
        back_gate, back_other = tl.dot(along_gate, to_gate), tl.dot(along_other, to_other)
        tl.store(place + summed, back_gate.to(kind), mask=here & ranks)
        tl.store(place + rank + summed, back_other.to(kind), mask=here & ranks)
        of_gate = tl.dot(tl.trans(along_gate), for_gate, of_gate)
        of_other = tl.dot(tl.trans(along_other), for_other, of_other)
        of_down = tl.dot(tl.trans(value), from_last, of_down)
        to_gates += step * to_row
        narrows += step * narrow_row
        lasts += step * next_rank
        place += step * (2 * rank)
    there = to_up + tl.program_id(1) * (2 * half) * rank + matrix
    tl.store(there, of_gate, mask=ranks)
    tl.store(there + half * rank, of_other, mask=ranks)
    there = to_down + tl.program_id(1) * half * next_rank
    tl.store(there + (c[:, None] * next_rank + n[None, :]), of_down, mask=nexts)


def _tuned(kernel: Any, *ways: tuple[int, int, int]) -> Any:
    """For so many rows, warps and stages; anew for twice as many rows, because a short run before
    training would decide for all of it. A warp has sixteen rows: with fewer, warps would compute
    each other's numbers once more."""
    tiles = [({"BM": rows}, warps, stages) for rows, warps, stages in ways]
    return autotuned(kernel, ("half", "R", "many"), tiles)


_swiglu_lora = _tuned(
    _swiglu_lora_kernel, (32, 2, 3), (64, 4, 3), (32, 2, 2), (64, 4, 2), (16, 1, 3)
)
_swiglu_lora_backward = _tuned(
    _swiglu_lora_backward_kernel, (64, 4, 1), (64, 4, 2), (32, 2, 2), (32, 2, 1)
)
