"""SwiGLU with LoRA of any rank on both sides: one kernel each way, and GEMMs for what is small.

`swiglu_lora.py` holds LoRA's matrices of a tile in registers, together with the sums of their
gradients. From some rank on these don't fit, or leave no room for anything else; and its widths are
whole tiles. Here a tile takes the rank in chunks and sums up nothing: gate, up and the gradient of
the activation get their LoRA, then SwiGLU is computed, all in one pass. The products along the
intermediate size (the next layer's `a A^T`, and every gradient of a LoRA matrix) are GEMMs, which
tensor cores are fast at with such ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.autotune import autotuned
from shardtune.kernels.lora_dropout import dropout_lora_a, kept_scale, threshold
from shardtune.kernels.lora_dropout import kept as _kept
from shardtune.kernels.lora_tile import add_lora as _add_lora
from shardtune.kernels.lora_tile import rank_chunk
from shardtune.kernels.matmul_fp32_out import matmul_fp32_out
from shardtune.kernels.sigmoid import sigmoid as _sigmoid
from shardtune.kernels.stacked_linear import empty_aligned
from shardtune.kernels.triton_import import tl, triton


def swiglu_any_rank(
    y: Tensor,
    lora_hidden: Tensor,
    lora_b: Tensor,
    next_lora_a: Tensor,
    seed: Tensor | None,
    p: float,
) -> tuple[Tensor, Tensor]:
    """`swiglu_lora` on a GPU, for any rank and width."""
    rows, half, rank = len(y), y.shape[1] // 2, lora_b.shape[1]
    activation = y.new_empty(rows, half)
    _swiglu_any_rank[_programs(rows, half)](
        y, lora_hidden, lora_b, activation, y.stride(0), lora_hidden.stride(0),
        rows, half, rank, rows.bit_length(), rank_chunk(rank),
    )  # fmt: skip
    if seed is not None:
        return activation, dropout_lora_a(activation, next_lora_a, seed, p, 1)
    return activation, activation @ next_lora_a.t()


def swiglu_any_rank_backward(
    grad_output: Tensor,
    grad_next_hidden: Tensor,
    next_lora_a: Tensor,
    y: Tensor,
    lora_hidden: Tensor,
    lora_b: Tensor,
    seed: Tensor | None,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu_lora_backward` on a GPU, for any rank and width."""
    (rows, half), rank, next_rank = grad_output.shape, lora_b.shape[1], len(next_lora_a)
    grads = empty_aligned(y, rows, 2 * half + 2 * rank)
    grad_y, *grad_hidden = torch.split(grads, [2 * half, rank, rank], dim=1)
    dropped_activation = y.new_empty(rows, half)
    dropout = (y, 0, 1.0) if seed is None else (seed, threshold(p), kept_scale(p))
    _swiglu_any_rank_backward[_programs(rows, half)](
        y, lora_hidden, lora_b, grad_output, grad_next_hidden, next_lora_a,
        grad_y, dropped_activation, *dropout,
        y.stride(0), lora_hidden.stride(0), grads.stride(0),
        rows, half, rank, next_rank, rows.bit_length(),
        rank_chunk(rank), rank_chunk(next_rank), seed is not None,
    )  # fmt: skip
    halves = grad_y.chunk(2, dim=1)
    for some, matrix, place in zip(halves, lora_b.chunk(2), grad_hidden, strict=True):
        torch.mm(some, matrix, out=place)
    pairs = zip(halves, lora_hidden.chunk(2, dim=1), strict=True)
    grad_lora_b = torch.cat([matmul_fp32_out(some.t(), hidden) for some, hidden in pairs])
    return grads, grad_lora_b, matmul_fp32_out(grad_next_hidden.t(), dropped_activation)


def _programs(rows: int, half: int) -> Any:
    return lambda chosen: (triton.cdiv(rows, chosen["BM"]), triton.cdiv(half, chosen["BN"]))


# Addresses are a 64-bit base for the program and 32-bit offsets, as in `swiglu_lora.py`.


def _swiglu_any_rank_kernel(  # type: ignore[no-untyped-def]
    y, lora_hidden, lora_b, activation, row, hidden_row, rows, half, rank, rows_log2,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BM
    m, c = tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    in_rows, in_columns = m < rows - begin, c < half
    inside = in_rows[:, None] & in_columns[None, :]
    tile = y + begin * row + (m[:, None] * row + c[None, :])
    gate = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(tile + half, mask=inside, other=0.0).to(tl.float32)
    hidden, matrix = lora_hidden + begin * hidden_row + m * hidden_row, lora_b + c * rank
    gate = _add_lora(gate, hidden, matrix, in_rows, in_columns, rank, 1, 1, R)
    up = _add_lora(up, hidden + rank, matrix + half * rank, in_rows, in_columns, rank, 1, 1, R)
    value = (gate * _sigmoid(gate) * up).to(activation.dtype.element_ty)
    tl.store(activation + begin * half + (m[:, None] * half + c[None, :]), value, mask=inside)


def _swiglu_any_rank_backward_kernel(  # type: ignore[no-untyped-def]
    y, lora_hidden, lora_b, grad_output, grad_next_hidden, next_lora_a,
    grad_y, dropped_activation, seed, dropped, scale, row, hidden_row, grad_row,
    rows, half, rank, next_rank, rows_log2,
    R: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BM
    m, c = tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    in_rows, in_columns = m < rows - begin, c < half
    inside = in_rows[:, None] & in_columns[None, :]
    kind = grad_y.dtype.element_ty
    short = m[:, None] * half + c[None, :]
    tile = y + begin * row + (m[:, None] * row + c[None, :])
    grad_hidden, next_a = grad_next_hidden + begin * next_rank + m * next_rank, next_lora_a + c
    grad = tl.load(grad_output + begin * half + short, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        whole = _kept(seed, tl.zeros((), tl.int32), begin + m[:, None], c[None, :], half, dropped)
        part = tl.zeros((BM, BN), dtype=tl.float32)
        part = _add_lora(part, grad_hidden, next_a, in_rows, in_columns, next_rank, 1, half, N)
        grad += tl.where(whole, part * scale, 0.0)
    else:
        grad = _add_lora(grad, grad_hidden, next_a, in_rows, in_columns, next_rank, 1, half, N)
    gate = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(tile + half, mask=inside, other=0.0).to(tl.float32)
    hidden, matrix = lora_hidden + begin * hidden_row + m * hidden_row, lora_b + c * rank
    gate = _add_lora(gate, hidden, matrix, in_rows, in_columns, rank, 1, 1, R)
    up = _add_lora(up, hidden + rank, matrix + half * rank, in_rows, in_columns, rank, 1, 1, R)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    back = grad_y + begin * grad_row + (m[:, None] * grad_row + c[None, :])
    tl.store(back, (grad * up * (sigmoid + silu * (1 - sigmoid))).to(kind), mask=inside)
    tl.store(back + half, (grad * silu).to(kind), mask=inside)
    value = silu * up
    if DROPOUT:
        value = tl.where(whole, value * scale, 0.0)
    tl.store(dropped_activation + begin * half + short, value.to(kind), mask=inside)


_TILES = [
    ({"BM": rows, "BN": columns}, warps, 3)
    for rows, columns, warps in (
        (64, 64, 4), (64, 64, 8), (64, 128, 8), (128, 64, 8), (32, 64, 4), (32, 128, 4),
    )
]  # fmt: skip
_swiglu_any_rank = autotuned(_swiglu_any_rank_kernel, ("half", "rank", "rows_log2"), _TILES)
_swiglu_any_rank_backward = autotuned(
    _swiglu_any_rank_backward_kernel, ("half", "rank", "next_rank", "rows_log2"), _TILES
)
