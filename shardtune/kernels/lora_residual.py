"""A product completed: with what LoRA adds to it, and what went past.

In bf16 the order matters. What went past has few bits behind those that a small number needs: added
to it alone, what LoRA gives would mostly be rounded away. So all three are summed up first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.autotune import autotuned

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None

LARGEST_RANK = 64


def add_lora_residual(y: Tensor, narrow: Tensor, up: Tensor, past: Tensor) -> Tensor:
    """`y + narrow @ up.T + past`, in the shape of the latter, which isn't that of the others: a row
    for each token. On a GPU it is one pass, rounded once."""
    (rows, columns), rank = y.shape, narrow.shape[1]
    known = triton is not None and y.is_cuda and y.dtype != torch.float32
    if not known or rank > LARGEST_RANK or not past.is_contiguous():
        return y.addmm(narrow, up.t()).view(past.shape) + past
    result = torch.empty_like(past)

    def tiles(chosen: Any) -> tuple[int, int]:
        return triton.cdiv(rows, chosen["BM"]), triton.cdiv(columns, chosen["BN"])

    _add_lora_residual[tiles](
        y, narrow, up, past, result, rows, columns, rank, *narrow.stride(), *up.stride(),
        rows.bit_length(), max(16, triton.next_power_of_2(rank)),
    )  # fmt: skip
    return result


def _add_lora_residual_kernel(  # type: ignore[no-untyped-def]
    y, narrow, up, past, result, rows, columns, rank,
    narrow_row, narrow_column, up_row, up_column, many,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BM
    m, r = tl.arange(0, BM), tl.arange(0, R)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    here, ranked = (m < rows - begin)[:, None], r < rank
    inside = here & (c < columns)[None, :]
    tile = begin * columns + (m[:, None] * columns + c[None, :])
    total = tl.load(past + tile, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(y + tile, mask=inside, other=0.0).to(tl.float32)
    some = narrow + begin * narrow_row + (m[:, None] * narrow_row + r[None, :] * narrow_column)
    some = tl.load(some, mask=here & ranked[None, :], other=0.0)
    matrix = up + (r[:, None] * up_column + c[None, :] * up_row)
    matrix = tl.load(matrix, mask=ranked[:, None] & (c < columns)[None, :], other=0.0)
    total = tl.dot(some, matrix, total).to(result.dtype.element_ty)
    tl.store(result + tile, total, mask=inside)


_add_lora_residual = autotuned(
    _add_lora_residual_kernel,
    ("columns", "R", "many"),
    [
        ({"BM": rows, "BN": columns}, warps, 3)
        for rows, columns, warps in (
            (32, 128, 4), (64, 128, 4), (64, 64, 4), (128, 128, 8), (16, 256, 4),
        )
    ],
)  # fmt: skip
