"""SwiGLU with LoRA on both sides, fused: forward and backward are one kernel each.

`silu(gate) * up` passes over the intermediate size. LoRA's addition to gate and up, the next
layer's `x A^T`, and in the backward pass the gradients of all their matrices read the same numbers,
so they are computed while these are in registers. A compiler fuses pointwise operations with one
GEMM, not with several small ones around them. Ranks that are too large for that, and widths that
aren't whole tiles, have kernels that do less (`swiglu_any_rank.py`). In fp32 and elsewhere than on
a GPU the small products are GEMMs of their own that add to what is there, and what is pointwise is
one pass.

Rows are tokens. `y` holds gate and up side by side, without LoRA; `lora_hidden` and `lora_b` have
gate's half first. The incoming gradient is without what flows back through the next layer's A.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.core.setup import LARGEST_SUMMED_RANK
from shardtune.kernels.autotune import autotuned
from shardtune.kernels.lora_dropout import (
    add_dropout_lora_a_grad,
    dropout_lora_a,
    dropout_lora_a_weight_grad,
    kept_scale,
    threshold,
)
from shardtune.kernels.lora_dropout import kept as _kept
from shardtune.kernels.matmul_fp32_out import matmul_fp32_out
from shardtune.kernels.sigmoid import sigmoid as _sigmoid
from shardtune.kernels.stacked_linear import empty_aligned
from shardtune.kernels.swiglu import swiglu, swiglu_backward_into
from shardtune.kernels.swiglu_any_rank import swiglu_any_rank, swiglu_any_rank_backward
from shardtune.kernels.triton_import import tl, triton

LARGEST_RANK = 64
"""Of the forward kernel; of the backward one it is `LARGEST_SUMMED_RANK`. Above it others are
faster."""
TILE = 64
"""Columns of a program's tile (BN)."""
SPLITS = 8
"""Split-K: programs that share a row (forward) or a column (backward). Their partial sums are added
afterwards."""


@torch.library.custom_op("shardtune::swiglu_lora", mutates_args=())
def swiglu_lora(
    y: Tensor,
    lora_hidden: Tensor,
    lora_b: Tensor,
    next_lora_a: Tensor,
    seed: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """SwiGLU with LoRA before and after it, in one pass: returns the activation and its product
    with the next layer's A.

    With `y = [x Wg^T | x Wu^T]`, `lora_hidden = [hg | hu]` and `lora_b = [Bg; Bu]`:

        gate = yg + hg Bg^T     up = yu + hu Bu^T     a = silu(gate) * up     returns a, a A_next^T

    Reads y, lora_hidden and the small matrices once, writes a; step by step, a compiler would write
    and read gate, up and a once more. With a seed the next layer's LoRA has dropout on its input
    (`lora_dropout.py`)."""
    rows, half, rank = len(y), y.shape[1] // 2, lora_b.shape[1]
    if not _on_gpu(y):
        activation = swiglu(_gate_up(y, lora_hidden, lora_b))
        if seed is not None:
            return activation, dropout_lora_a(activation, next_lora_a, seed, p, 1)
        return activation, activation @ next_lora_a.t()
    if not _fits(y, LARGEST_RANK, rank, len(next_lora_a)):
        return swiglu_any_rank(y, lora_hidden, lora_b, next_lora_a, seed, p)
    activation = y.new_empty(rows, half)
    sums = y.new_empty(SPLITS, rows, len(next_lora_a), dtype=torch.float32)
    given = (y, lora_hidden, lora_b, next_lora_a, activation, sums, *_dropout(seed, p, y))
    _swiglu_lora[lambda chosen: (triton.cdiv(rows, chosen["BM"]), SPLITS)](
        *given, y.stride(0), lora_hidden.stride(0), *_sizes(rows, half, rank, len(next_lora_a)),
        seed is not None,
    )  # fmt: skip
    return activation, sums.sum(0).to(y.dtype)


@swiglu_lora.register_fake
def _(
    y: Tensor,
    lora_hidden: Tensor,
    lora_b: Tensor,
    next_lora_a: Tensor,
    seed: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    rows, width = y.shape
    return y.new_empty(rows, width // 2), y.new_empty(rows, next_lora_a.shape[0])


@torch.library.custom_op("shardtune::swiglu_lora_backward", mutates_args=())
def swiglu_lora_backward(
    grad_output: Tensor,
    grad_next_hidden: Tensor,
    next_lora_a: Tensor,
    y: Tensor,
    lora_hidden: Tensor,
    lora_b: Tensor,
    seed: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """SwiGLU's backward with the LoRA backwards around it. With `da = grad_output +
    grad_next_hidden @ next_lora_a` and s = sigmoid(gate):

        dgate = da * up * (s + silu(gate) * (1 - s))        dup = da * silu(gate)
        dh = [dgate Bg | dup Bu]        dB = [dgate^T hg; dup^T hu]
        dA_next = grad_next_hidden^T a

    Returns `[dgate | dup | dh]` as one matrix (the next GEMM takes it whole), dB and dA_next, both
    in fp32. gate, up and the activation are computed again: to save them would cost more."""
    (rows, half), rank = grad_output.shape, lora_b.shape[1]
    operands = (grad_output, grad_next_hidden, next_lora_a, y, lora_hidden, lora_b, seed, p)
    if not _on_gpu(y):
        return _backward_step_by_step(*operands)
    if not _fits(y, LARGEST_SUMMED_RANK, rank, len(next_lora_a)):
        return swiglu_any_rank_backward(*operands)
    grads = empty_aligned(y, rows, 2 * half + 2 * rank)
    grad_y, grad_hidden = torch.split(grads, [2 * half, 2 * rank], dim=1)
    # Partial sums are rounded to y's dtype, as the matmul's operands are.
    sums = y.new_empty(half // TILE, rows, 2 * rank)
    grad_lora_b = y.new_empty(SPLITS, 2 * half, rank, dtype=torch.float32)
    grad_next_lora_a = y.new_empty(SPLITS, half, len(next_lora_a), dtype=torch.float32)
    given = (
        y,
        lora_hidden,
        lora_b,
        grad_output,
        grad_next_hidden,
        next_lora_a,
        grad_y,
        sums,
        grad_lora_b,
        grad_next_lora_a,
        *_dropout(seed, p, y),
    )
    strides = (y.stride(0), lora_hidden.stride(0), grads.stride(0))
    _swiglu_lora_backward[(half // TILE, SPLITS)](
        *given, *strides, *_sizes(rows, half, rank, len(next_lora_a)), seed is not None
    )
    grad_hidden.copy_(sums.sum(0, dtype=torch.float32))
    return grads, grad_lora_b.sum(0), grad_next_lora_a.sum(0).t().contiguous()


@swiglu_lora_backward.register_fake
def _(
    grad_output: Tensor,
    grad_next_hidden: Tensor,
    next_lora_a: Tensor,
    y: Tensor,
    lora_hidden: Tensor,
    lora_b: Tensor,
    seed: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_b, grad_next_a = (
        torch.empty_like(each, dtype=torch.float32) for each in (lora_b, next_lora_a)
    )
    return empty_aligned(y, y.shape[0], y.shape[1] + lora_hidden.shape[1]), grad_b, grad_next_a


def _gate_up(y: Tensor, lora_hidden: Tensor, lora_b: Tensor) -> Tensor:
    """Gate and up with LoRA, side by side: y + [hg Bg^T | hu Bu^T]."""
    result = y.new_empty(y.shape)
    halves = (result.chunk(2, dim=1), y.chunk(2, dim=1), lora_hidden.chunk(2, dim=1))
    for place, base, hidden, matrix in zip(*halves, lora_b.chunk(2), strict=True):
        torch.addmm(base, hidden, matrix.t(), out=place)
    return result


def _backward_step_by_step(
    grad_output: Tensor,
    grad_next_hidden: Tensor,
    next_lora_a: Tensor,
    y: Tensor,
    lora_hidden: Tensor,
    lora_b: Tensor,
    seed: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, half), rank = grad_output.shape, lora_b.shape[1]
    if seed is None:
        grad_activation = torch.addmm(grad_output, grad_next_hidden, next_lora_a)
    else:
        grad_activation = add_dropout_lora_a_grad(
            grad_output, grad_next_hidden, next_lora_a, seed, p, 1
        )
    grads = empty_aligned(y, rows, 2 * half + 2 * rank)
    grad_y, *grad_hidden = torch.split(grads, [2 * half, rank, rank], dim=1)
    gate_up = _gate_up(y, lora_hidden, lora_b)
    activation = swiglu_backward_into(grad_y, grad_activation, gate_up)
    halves = grad_y.chunk(2, dim=1)
    for some, matrix, place in zip(halves, lora_b.chunk(2), grad_hidden, strict=True):
        torch.mm(some, matrix, out=place)
    parts = zip(halves, lora_hidden.chunk(2, dim=1), strict=True)
    grad_lora_b = torch.cat([matmul_fp32_out(some.t(), of) for some, of in parts])
    if seed is None:
        grad_next_lora_a = matmul_fp32_out(grad_next_hidden.t(), activation)
    else:
        grad_next_lora_a = dropout_lora_a_weight_grad(grad_next_hidden, activation, seed, p, 1)
    return grads, grad_lora_b, grad_next_lora_a


def _on_gpu(y: Tensor) -> bool:
    """Whether there are kernels. fp32 goes step by step, because tensor cores would round it to
    TF32."""
    return y.is_cuda and triton is not None and y.dtype != torch.float32


def _fits(y: Tensor, largest: int, *ranks: int) -> bool:
    """Whether the kernels here apply: to ranks that aren't too large and widths of whole tiles."""
    return max(ranks) <= largest and y.shape[1] % (2 * TILE) == 0


def _dropout(seed: Tensor | None, p: float, y: Tensor) -> tuple[Tensor, int, float]:
    """What a kernel is told of dropout; without a seed it doesn't look."""
    return (y, 0, 1.0) if seed is None else (seed, threshold(p), kept_scale(p))


def _sizes(rows: int, half: int, *ranks: int) -> tuple[int, ...]:
    padded = [
        max(16, triton.next_power_of_2(rank)) for rank in ranks
    ]  # the least that tl.dot takes
    return rows, half, *ranks, rows.bit_length(), *padded, SPLITS, TILE


# Addresses are a 64-bit base for the program and 32-bit offsets in its tile: a 64-bit address for
# each number would take half of the registers.
# The next tile is prefetched before this one is computed. Triton pipelines the operands of tl.dot
# by itself (`num_stages`), but not the accumulators that are loaded.


def _swiglu_lora_kernel(  # type: ignore[no-untyped-def]
    y, lora_hidden, lora_b, next_lora_a, activation, sums, seed, dropped, scale, row, hidden_row,
    rows, half, rank, next_rank, rows_log2,
    R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """BM rows, and a share of the columns (split-K of the product with the next A)."""
    begin_row = tl.program_id(0).to(tl.int64) * BM
    m, r, n, c = tl.arange(0, BM), tl.arange(0, R), tl.arange(0, N), tl.arange(0, BN)
    here = (m < rows - begin_row)[:, None]
    some = lora_hidden + begin_row * hidden_row + (m[:, None] * hidden_row + r[None, :])
    ranked = here & (r[None, :] < rank)
    hidden_gate = tl.load(some, mask=ranked, other=0.0)
    hidden_up = tl.load(some + rank, mask=ranked, other=0.0)
    total = tl.zeros((BM, N), dtype=tl.float32)
    chunk = tl.cdiv(tl.cdiv(half, S), BN) * BN
    first = tl.program_id(1) * chunk
    end = tl.minimum(first + chunk, half)
    gates, activations = y + begin_row * row, activation + begin_row * half
    tile = m[:, None] * row + (first + c)[None, :]
    any_left = here & (first < end)
    next_gate = tl.load(gates + tile, mask=any_left, other=0.0)
    next_up = tl.load(gates + half + tile, mask=any_left, other=0.0)
    for begin in range(first, end, BN):
        column = begin + c
        gate, up = next_gate.to(tl.float32), next_up.to(tl.float32)
        tile += BN
        ahead = here & (begin + BN < end)
        next_gate = tl.load(gates + tile, mask=ahead, other=0.0)
        next_up = tl.load(gates + half + tile, mask=ahead, other=0.0)
        matrix = lora_b + (column[None, :] * rank + r[:, None])
        b_gate = tl.load(matrix, mask=r[:, None] < rank, other=0.0)
        b_up = tl.load(matrix + half * rank, mask=r[:, None] < rank, other=0.0)
        gate = tl.dot(hidden_gate, b_gate, gate)
        up = tl.dot(hidden_up, b_up, up)
        value = (gate * _sigmoid(gate) * up).to(activation.dtype.element_ty)
        tl.store(activations + (m[:, None] * half + column[None, :]), value, mask=here)
        kept = n[None, :] < next_rank
        next_a = tl.load(next_lora_a + (n[None, :] * half + column[:, None]), mask=kept, other=0.0)
        if DROPOUT:
            token = begin_row + m[:, None]
            whole = _kept(seed, tl.zeros((), tl.int32), token, column[None, :], half, dropped)
            value = tl.where(whole, value, 0.0).to(activation.dtype.element_ty)
        total = tl.dot(value, next_a, total)
    place = sums + (tl.program_id(1) * rows + begin_row) * next_rank
    kept = here & (n[None, :] < next_rank)
    if DROPOUT:
        total *= scale
    tl.store(place + (m[:, None] * next_rank + n[None, :]), total, mask=kept)


def _swiglu_lora_backward_kernel(  # type: ignore[no-untyped-def]
    y, lora_hidden, lora_b, grad_output, grad_next_hidden, next_lora_a,
    grad_y, sums, grad_lora_b, grad_next_lora_a, seed, dropped, scale, row, hidden_row, grad_row,
    rows, half, rank, next_rank, rows_log2,
    R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """BN columns, and a share of the rows: B and A are read once, and their gradients are
    accumulated in registers."""
    m, r, n = tl.arange(0, BM), tl.arange(0, R), tl.arange(0, N)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    ranks, nexts = r[None, :] < rank, n[None, :] < next_rank
    matrix = c[:, None] * rank + r[None, :]
    b_gate = tl.load(lora_b + matrix, mask=ranks, other=0.0)
    b_up = tl.load(lora_b + half * rank + matrix, mask=ranks, other=0.0)
    kept = n[:, None] < next_rank
    next_a = tl.load(next_lora_a + (n[:, None] * half + c[None, :]), mask=kept, other=0.0)
    grad_b_gate = tl.zeros((BN, R), dtype=tl.float32)
    grad_b_up = tl.zeros((BN, R), dtype=tl.float32)
    grad_next_a = tl.zeros((BN, N), dtype=tl.float32)
    chunk = tl.cdiv(tl.cdiv(rows, S), BM) * BM
    first = tl.program_id(1) * chunk
    end = tl.minimum(first + chunk, rows)
    base, step = first.to(tl.int64), tl.zeros((), tl.int64) + BM
    gates, grad_activations = y + base * row, grad_output + base * half
    grad_gates = grad_y + base * grad_row
    hiddens, grad_next_hiddens = (
        lora_hidden + base * hidden_row,
        grad_next_hidden + base * next_rank,
    )
    place = sums + (tl.program_id(0).to(tl.int64) * rows + base) * (2 * rank)
    tile = m[:, None] * row + c[None, :]
    grad_tile = m[:, None] * grad_row + c[None, :]
    short = m[:, None] * half + c[None, :]
    small = m[:, None] * hidden_row + r[None, :]
    summed = m[:, None] * (2 * rank) + r[None, :]
    smaller = m[:, None] * next_rank + n[None, :]
    kind = grad_y.dtype.element_ty
    here = (first + m < end)[:, None]
    next_gate = tl.load(gates + tile, mask=here, other=0.0)
    next_up = tl.load(gates + half + tile, mask=here, other=0.0)
    next_grad = tl.load(grad_activations + short, mask=here, other=0.0)
    for begin in range(first, end, BM):
        here = (begin + m < end)[:, None]
        gate, up = next_gate.to(tl.float32), next_up.to(tl.float32)
        grad_activation = next_grad.to(tl.float32)
        gates += step * row
        grad_activations += step * half
        ahead = (begin + BM + m < end)[:, None]
        next_gate = tl.load(gates + tile, mask=ahead, other=0.0)
        next_up = tl.load(gates + half + tile, mask=ahead, other=0.0)
        next_grad = tl.load(grad_activations + short, mask=ahead, other=0.0)
        hidden_gate = tl.load(hiddens + small, mask=here & ranks, other=0.0)
        hidden_up = tl.load(hiddens + rank + small, mask=here & ranks, other=0.0)
        grad_next = tl.load(grad_next_hiddens + smaller, mask=here & nexts, other=0.0)
        gate = tl.dot(hidden_gate, tl.trans(b_gate), gate)
        up = tl.dot(hidden_up, tl.trans(b_up), up)
        if DROPOUT:
            token = (begin + m)[:, None]
            whole = _kept(seed, tl.zeros((), tl.int32), token, c[None, :], half, dropped)
            grad_activation += tl.where(whole, tl.dot(grad_next, next_a) * scale, 0.0)
        else:
            grad_activation = tl.dot(grad_next, next_a, grad_activation)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        value = (silu * up).to(kind)
        grad_gate = (grad_activation * up * (sigmoid + silu * (1 - sigmoid))).to(kind)
        grad_up = (grad_activation * silu).to(kind)
        tl.store(grad_gates + grad_tile, grad_gate, mask=here)
        tl.store(grad_gates + half + grad_tile, grad_up, mask=here)
        grad_hidden_gate, grad_hidden_up = tl.dot(grad_gate, b_gate), tl.dot(grad_up, b_up)
        tl.store(place + summed, grad_hidden_gate.to(kind), mask=here & ranks)
        tl.store(place + rank + summed, grad_hidden_up.to(kind), mask=here & ranks)
        grad_b_gate = tl.dot(tl.trans(grad_gate), hidden_gate, grad_b_gate)
        grad_b_up = tl.dot(tl.trans(grad_up), hidden_up, grad_b_up)
        if DROPOUT:
            value = tl.where(whole, value, 0.0).to(kind)
        grad_next_a = tl.dot(tl.trans(value), grad_next, grad_next_a)
        grad_gates += step * grad_row
        hiddens += step * hidden_row
        grad_next_hiddens += step * next_rank
        place += step * (2 * rank)
    there = grad_lora_b + tl.program_id(1) * (2 * half) * rank + matrix
    tl.store(there, grad_b_gate, mask=ranks)
    tl.store(there + half * rank, grad_b_up, mask=ranks)
    if DROPOUT:
        grad_next_a *= scale
    there = grad_next_lora_a + tl.program_id(1) * half * next_rank
    tl.store(there + (c[:, None] * next_rank + n[None, :]), grad_next_a, mask=nexts)


def _autotuned(kernel: Any, *configs: tuple[int, int, int]) -> Any:
    """Autotuned over (BM, warps, stages); anew whenever the row count doubles, because a short
    preflight before training would decide for all of it. A warp has 16 rows: with fewer, warps
    would repeat each other's work."""
    tiles = [({"BM": rows}, warps, stages) for rows, warps, stages in configs]
    return autotuned(kernel, ("half", "R", "rows_log2"), tiles)


_swiglu_lora = _autotuned(
    _swiglu_lora_kernel, (32, 2, 3), (64, 4, 3), (32, 2, 2), (64, 4, 2), (16, 1, 3)
)
_swiglu_lora_backward = _autotuned(
    _swiglu_lora_backward_kernel, (64, 4, 1), (64, 4, 2), (32, 2, 2), (32, 2, 1)
)
