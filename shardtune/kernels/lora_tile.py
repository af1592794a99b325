"""LoRA's addition to a tile of a kernel: `total + hidden @ B^T`, for any rank."""

from __future__ import annotations

from shardtune.kernels.triton_import import jit, tl, triton

RANK_CHUNK = 64
"""Of the rank: what of it is in shared memory at a time."""


def rank_chunk(rank: int) -> int:
    """As much of a rank as a kernel takes at a time; 16 is the least that `tl.dot` takes."""
    return min(RANK_CHUNK, max(16, int(triton.next_power_of_2(rank))))


def _add_lora_kernel(  # type: ignore[no-untyped-def]
    total, hidden, matrix, in_rows, in_columns, rank, hidden_column, matrix_column,
    R: tl.constexpr,
):  # fmt: skip
    """`hidden` points to the first number of each row of the tile, `matrix` to that of each of its
    columns; the steps lead on along the rank."""
    r = tl.arange(0, R)
    for begin in range(0, rank, R):
        ranked = r < rank - begin
        left = tl.load(
            hidden[:, None] + (begin + r)[None, :] * hidden_column,
            mask=in_rows[:, None] & ranked[None, :],
            other=0.0,
        )
        right = tl.load(
            matrix[None, :] + (begin + r)[:, None] * matrix_column,
            mask=ranked[:, None] & in_columns[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total)
    return total


add_lora = jit(_add_lora_kernel)
