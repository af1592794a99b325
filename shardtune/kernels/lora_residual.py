"""LoRA and residual added to a matmul's output in one pass: `y + h B^T + residual`, h = x A^T.

In bf16 the order matters. The residual stream is large beside LoRA's output: added to it alone,
most of that would be rounded away. So all three are summed in fp32 and rounded once. The kernel
reads y and residual and writes the sum; step by step it would be two more passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.autotune import autotuned
from shardtune.kernels.lora_tile import add_lora as _add_lora
from shardtune.kernels.lora_tile import rank_chunk
from shardtune.kernels.triton_import import tl, triton


def add_lora_residual(y: Tensor, lora_hidden: Tensor, lora_b: Tensor, residual: Tensor) -> Tensor:
    """`y + lora_hidden @ lora_b.T + residual`, in the residual's shape (the others have a row for
    each token). On a GPU it is one pass, rounded once."""
    (rows, columns), rank = y.shape, lora_hidden.shape[1]
    fits_kernel = triton is not None and y.is_cuda and y.dtype != torch.float32
    if not fits_kernel or not residual.is_contiguous():
        return y.addmm(lora_hidden, lora_b.t()).view(residual.shape) + residual
    result = torch.empty_like(residual)

    def tiles(chosen: Any) -> tuple[int, int]:
        return triton.cdiv(rows, chosen["BM"]), triton.cdiv(columns, chosen["BN"])

    _add_lora_residual[tiles](
        y, lora_hidden, lora_b, residual, result, rows, columns, rank,
        *lora_hidden.stride(), *lora_b.stride(),
        rows.bit_length(), rank_chunk(rank),
    )  # fmt: skip
    return result


def _add_lora_residual_kernel(  # type: ignore[no-untyped-def]
    y, lora_hidden, lora_b, residual, result, rows, columns, rank,
    hidden_row, hidden_column, b_row, b_column, rows_log2,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BM
    m, c = tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    in_rows, in_columns = m < rows - begin, c < columns
    inside = in_rows[:, None] & in_columns[None, :]
    tile = begin * columns + (m[:, None] * columns + c[None, :])
    total = tl.load(residual + tile, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(y + tile, mask=inside, other=0.0).to(tl.float32)
    hidden, matrix = lora_hidden + begin * hidden_row + m * hidden_row, lora_b + c * b_row
    total = _add_lora(
        total, hidden, matrix, in_rows, in_columns, rank, hidden_column, b_column, R
    ).to(result.dtype.element_ty)
    tl.store(result + tile, total, mask=inside)


_add_lora_residual = autotuned(
    _add_lora_residual_kernel,
    ("columns", "rank", "rows_log2"),
    [
        ({"BM": rows, "BN": columns}, warps, 3)
        for rows, columns, warps in (
            (32, 128, 4), (64, 128, 4), (64, 64, 4), (128, 128, 8), (16, 256, 4),
        )
    ],
)  # fmt: skip
