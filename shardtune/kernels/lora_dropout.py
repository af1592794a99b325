"""LoRA with dropout on its input: `h = (x * m / (1 - p)) A^T`, without ever writing `x * m`.

Each layer has a mask of its own, layers that share an input too. A mask is a hash of its seed and
of a number's place, so nobody keeps it: forward and backward compute it where they read x. Seeds
are drawn from torch's generator. What the backward pass needs besides

    dA = (dh^T (x * m)) / (1 - p)        dx = g W + (dh A) * m / (1 - p)

is one kernel each. Layers with a shared input have their A stacked, and as many columns each.
Elsewhere than on a GPU the same is done step by step, with the same masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.autotune import autotuned
from shardtune.kernels.matmul_fp32_out import matmul_fp32_out
from shardtune.kernels.triton_import import jit, tl, triton

LARGEST_DROPOUT_RANK = 256
"""Of LoRA: a tile of a larger one would not fit into shared memory."""
_SPLITS = 4
"""Split-K: programs that share an output. Their partial sums are added afterwards."""
_BITS = 24
"""Of a hash, which decide whether a number is kept."""
_LOW = 0xFFFFFFFF


@torch.library.custom_op("shardtune::dropout_seed", mutates_args=())
def dropout_seed(like: Tensor, which: int) -> Tensor:
    """A seed from the generator of `like`'s device. `which` tells those of a decoder layer apart:
    to a compiler two equal calls are one. Its result is saved and never computed again."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), device=like.device)


@dropout_seed.register_fake
def _(like: Tensor, which: int) -> Tensor:
    return like.new_empty(1, dtype=torch.int64)


def threshold(p: float) -> int:
    """Hashes below it are dropped."""
    return round(p * (1 << _BITS))


def kept_scale(p: float) -> float:
    """1 / (1 - p), of the p that a hash can tell."""
    return 1 / (1 - threshold(p) / (1 << _BITS))


def kept_mask(seed: Tensor, p: float, rows: int, width: int, layer: int = 0) -> Tensor:
    """The mask of a layer, step by step: True where a number is kept."""
    low = ((seed & _LOW) + layer * 0x9E3779B9) & _LOW
    high = (seed >> 32) & _LOW
    x = torch.arange(rows * width, device=seed.device).view(rows, width) & _LOW
    x = x ^ (x >> 16) ^ (low ^ (low >> 16))
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = ((x + high) * 0x846CA68B) & _LOW
    return (x >> (32 - _BITS)) >= threshold(p)


@torch.library.custom_op("shardtune::dropout_lora_a", mutates_args=())
def dropout_lora_a(x: Tensor, lora_a: Tensor, seed: Tensor, p: float, layers: int) -> Tensor:
    """`dropout(x) @ A.T` of each layer, side by side."""
    (rows, width), rank = x.shape, len(lora_a) // layers
    if not _on_gpu(x, rank):
        parts = [
            _dropped(x, seed, p, layer) @ matrix.t()
            for layer, matrix in enumerate(lora_a.chunk(layers))
        ]
        return torch.cat(parts, dim=1)
    sums = x.new_empty(_SPLITS, rows, len(lora_a), dtype=torch.float32)

    def programs(chosen: Any) -> tuple[int, int]:
        return layers * triton.cdiv(rows, chosen["BM"]), _SPLITS

    _dropout_lora_a[programs](
        x, lora_a, seed, sums, rows, width, x.stride(0), rank, rows.bit_length(),
        threshold(p), kept_scale(p), layers, _padded(rank), _SPLITS,
    )  # fmt: skip
    return sums.sum(0).to(x.dtype)


@dropout_lora_a.register_fake
def _(x: Tensor, lora_a: Tensor, seed: Tensor, p: float, layers: int) -> Tensor:
    return x.new_empty(x.shape[0], lora_a.shape[0])


@torch.library.custom_op("shardtune::dropout_lora_a_weight_grad", mutates_args=())
def dropout_lora_a_weight_grad(
    grad_hidden: Tensor, x: Tensor, seed: Tensor, p: float, layers: int
) -> Tensor:
    """The gradient of the stacked A in fp32: `grad_hidden.T @ dropout(x)`, layer by layer."""
    (rows, width), rank = x.shape, grad_hidden.shape[1] // layers
    if not _on_gpu(x, rank):
        parts = [
            matmul_fp32_out(part.t(), _dropped(x, seed, p, layer))
            for layer, part in enumerate(grad_hidden.chunk(layers, dim=1))
        ]
        return torch.cat(parts)
    sums = x.new_empty(_SPLITS, layers * rank, width, dtype=torch.float32)

    def programs(chosen: Any) -> tuple[int, int]:
        return layers * triton.cdiv(width, chosen["BN"]), _SPLITS

    _dropout_weight_grad[programs](
        grad_hidden, x, seed, sums, rows, width, grad_hidden.stride(0), x.stride(0), rank,
        rows.bit_length(), threshold(p), kept_scale(p), layers, _padded(rank), _SPLITS,
    )  # fmt: skip
    return sums.sum(0)


@dropout_lora_a_weight_grad.register_fake
def _(grad_hidden: Tensor, x: Tensor, seed: Tensor, p: float, layers: int) -> Tensor:
    return x.new_empty(grad_hidden.shape[1], x.shape[1], dtype=torch.float32)


@torch.library.custom_op("shardtune::add_dropout_lora_a_grad", mutates_args=())
def add_dropout_lora_a_grad(
    grad_x: Tensor, grad_hidden: Tensor, lora_a: Tensor, seed: Tensor, p: float, layers: int
) -> Tensor:
    """`grad_x` plus what flows back through each layer's A and mask, rounded once."""
    (rows, width), rank = grad_x.shape, len(lora_a) // layers
    if not _on_gpu(grad_x, rank):
        total = grad_x.float()
        for layer, matrix in enumerate(lora_a.chunk(layers)):
            part = grad_hidden[:, layer * rank : (layer + 1) * rank] @ matrix
            total = total + _dropped(part, seed, p, layer)
        return total.to(grad_x.dtype)
    result = grad_x.new_empty(grad_x.shape)

    def programs(chosen: Any) -> tuple[int, int]:
        return triton.cdiv(rows, chosen["BM"]), triton.cdiv(width, chosen["BN"])

    _add_dropout_grad[programs](
        grad_x, grad_hidden, lora_a, seed, result, rows, width, grad_hidden.stride(0), rank,
        rows.bit_length(), threshold(p), kept_scale(p), layers, _padded(rank),
    )  # fmt: skip
    return result


@add_dropout_lora_a_grad.register_fake
def _(grad_x: Tensor, *_: Any) -> Tensor:
    return grad_x.new_empty(grad_x.shape)


def _dropped(x: Tensor, seed: Tensor, p: float, layer: int) -> Tensor:
    rows, width = x.shape
    return x * kept_mask(seed, p, rows, width, layer) * kept_scale(p)


def _on_gpu(x: Tensor, rank: int) -> bool:
    known = x.is_cuda and triton is not None and x.dtype != torch.float32
    return known and rank <= LARGEST_DROPOUT_RANK


def _padded(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))  # the least that tl.dot takes


def _kept_kernel(seed, layer, row, column, width, dropped):  # type: ignore[no-untyped-def]
    """`kept_mask` of a tile: rows as a column, columns as a row, numbers below `dropped` out."""
    both = tl.load(seed)
    low = (both & 0xFFFFFFFF).to(tl.uint32) + layer.to(tl.uint32) * 0x9E3779B9
    high = ((both >> 32) & 0xFFFFFFFF).to(tl.uint32)
    wide = (tl.zeros((), tl.int32) + width).to(tl.uint32)
    x = row.to(tl.uint32) * wide + column.to(tl.uint32)
    x = x ^ (x >> 16) ^ (low ^ (low >> 16))
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = (x + high) * 0x846CA68B
    return x >= ((tl.zeros((), tl.int32) + dropped).to(tl.uint32) << 8)


kept = jit(_kept_kernel)


def _dropout_lora_a_kernel(  # type: ignore[no-untyped-def]
    x, lora_a, seed, sums, rows, width, x_row, rank, rows_log2, dropped, scale,
    L: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of one layer, and a share of the columns."""
    layer = tl.program_id(0) % L
    m = (tl.program_id(0) // L).to(tl.int64) * BM + tl.arange(0, BM)
    r, c = tl.arange(0, R), tl.arange(0, BK)
    in_rows, in_rank = (m < rows)[:, None], (r < rank)[None, :]
    chunk = tl.cdiv(tl.cdiv(width, S), BK) * BK
    first = tl.program_id(1) * chunk
    end = tl.minimum(first + chunk, width)
    total = tl.zeros((BM, R), dtype=tl.float32)
    for begin in range(first, end, BK):
        column = begin + c
        inside = column < end
        tile = tl.load(
            x + (m[:, None] * x_row + column[None, :]), mask=in_rows & inside[None, :], other=0.0
        )
        whole = kept(seed, layer, m[:, None], column[None, :], width, dropped)
        tile = tl.where(whole, tile, 0.0).to(x.dtype.element_ty)
        matrix = lora_a + ((layer * rank + r)[None, :] * width + column[:, None])
        a = tl.load(matrix, mask=in_rank & inside[:, None], other=0.0)
        total = tl.dot(tile, a, total)
    place = sums + (tl.program_id(1) * rows + m)[:, None] * (L * rank)
    tl.store(place + (layer * rank + r)[None, :], total * scale, mask=in_rows & in_rank)


def _dropout_weight_grad_kernel(  # type: ignore[no-untyped-def]
    grad_hidden, x, seed, sums, rows, width, grad_row, x_row, rank, rows_log2, dropped, scale,
    L: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN columns of one layer's A, and a share of the rows."""
    layer = tl.program_id(0) % L
    c = (tl.program_id(0) // L) * BN + tl.arange(0, BN)
    m, r = tl.arange(0, BM), tl.arange(0, R)
    in_columns, in_rank = (c < width)[None, :], r < rank
    chunk = tl.cdiv(tl.cdiv(rows, S), BM) * BM
    first = tl.program_id(1) * chunk
    end = tl.minimum(first + chunk, rows)
    total = tl.zeros((R, BN), dtype=tl.float32)
    for begin in range(first, end, BM):
        row = (begin + m).to(tl.int64)[:, None]
        inside = row < end
        tile = tl.load(x + (row * x_row + c[None, :]), mask=inside & in_columns, other=0.0)
        whole = kept(seed, layer, row, c[None, :], width, dropped)
        tile = tl.where(whole, tile, 0.0).to(x.dtype.element_ty)
        hidden = tl.load(
            grad_hidden + (row * grad_row + (layer * rank + r)[None, :]),
            mask=inside & in_rank[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(hidden), tile, total)
    place = sums + (tl.program_id(1) * L * rank + layer * rank + r)[:, None] * width
    tl.store(place + c[None, :], total * scale, mask=in_rank[:, None] & in_columns)


def _add_dropout_grad_kernel(  # type: ignore[no-untyped-def]
    grad_x, grad_hidden, lora_a, seed, result, rows, width, grad_row, rank, rows_log2, dropped,
    scale, L: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    c = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    r = tl.arange(0, R)
    in_rows, in_columns = m < rows, c < width
    tile = m * width + c
    total = tl.load(grad_x + tile, mask=in_rows & in_columns, other=0.0).to(tl.float32)
    for layer in tl.static_range(L):
        column = layer * rank + r[None, :]
        ranked = r[None, :] < rank
        hidden = tl.load(grad_hidden + (m * grad_row + column), mask=in_rows & ranked, other=0.0)
        matrix = lora_a + ((layer * rank + r)[:, None] * width + c)
        a = tl.load(matrix, mask=(r < rank)[:, None] & in_columns, other=0.0)
        part = tl.dot(hidden, a) * scale
        number = tl.zeros((), tl.int32) + layer
        total += tl.where(kept(seed, number, m, c, width, dropped), part, 0.0)
    tl.store(result + tile, total.to(result.dtype.element_ty), mask=in_rows & in_columns)


_KEY = ("width", "L", "R", "rows_log2")
_dropout_lora_a = autotuned(
    _dropout_lora_a_kernel,
    _KEY,
    [
        ({"BM": rows, "BK": columns}, warps, 3)
        for rows, columns, warps in ((64, 64, 4), (32, 64, 4), (128, 64, 8), (32, 128, 4))
    ],
)
_dropout_weight_grad = autotuned(
    _dropout_weight_grad_kernel,
    _KEY,
    [
        ({"BM": rows, "BN": columns}, warps, 3)
        for rows, columns, warps in ((64, 64, 4), (32, 128, 4), (64, 128, 8), (32, 64, 4))
    ],
)
_add_dropout_grad = autotuned(
    _add_dropout_grad_kernel,
    _KEY,
    [
        ({"BM": rows, "BN": columns}, warps, 2)
        for rows, columns, warps in ((64, 128, 4), (64, 64, 4), (32, 128, 4), (128, 128, 8))
    ],
)
