"""Stacked linear layers: those that share an input (Q, K, V; gate, up) as one GEMM.

Their weights are views of one buffer, below each other, so forward and backward are one GEMM each
instead of several that read the same input (or add to the same gradient). Below them are spare rows
for the adapters' stacked A: then x A^T comes out of the same GEMM, and dh A goes back with it.

Each is a custom op, which a compiler doesn't look into: so selective activation checkpointing can
choose what to save matmul by matmul.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shardtune.kernels.lora_residual import add_lora_residual

LinearLayers = tuple[nn.Linear, ...]
"""Layers that share an input. Their outputs are columns of one matrix."""
CACHE_LINE = 64
"""128 bytes, in 16-bit numbers."""


def stack_weights(layers: LinearLayers, spare: int) -> None:
    """Moves the weights of layers that share an input into one buffer, as views below each other,
    with `spare` rows behind them. They have to be whole, and on the device where they stay."""
    weights = [layer.weight.detach() for layer in layers]
    assert all(type(weight) is Tensor and weight.dim() == 2 for weight in weights)
    rows = [len(weight) for weight in weights]
    stacked = weights[0].new_empty(sum(rows) + spare, weights[0].shape[1])
    places = torch.split(stacked, [*rows, spare])
    for layer, weight, place in zip(layers, weights, places[:-1], strict=True):
        layer.weight.data = place.copy_(weight)
        layer.spare_rows = spare  # type: ignore[assignment]


def spare_rows(layers: LinearLayers) -> int:
    """Spare rows that `stack_weights` has left. Engines may move weights afterwards, so a matmul
    compares addresses each time."""
    return int(getattr(layers[-1], "spare_rows", 0))


def empty_aligned(like: Tensor, rows: int, columns: int) -> Tensor:
    """An empty matrix; on a GPU its rows are aligned to cache lines, or a tile of 64 columns would
    touch two of them. Elsewhere it is dense: oneDNN multiplies what lies behind the end of a row
    with zeros, which makes NaN of whatever is found there."""
    padded = -(-columns // CACHE_LINE) * CACHE_LINE if like.is_cuda else columns
    return like.new_empty(rows, padded)[:, :columns]


def cat_aligned(*parts: Tensor) -> Tensor:
    """`torch.cat(parts, dim=1)` into an `empty_aligned` matrix, as the op's fake says."""
    result = empty_aligned(parts[0], len(parts[0]), sum(part.shape[1] for part in parts))
    torch.cat(parts, dim=1, out=result)
    return result


@torch.library.custom_op("shardtune::stacked_linear", mutates_args=())
def stacked_linear(
    lora_hidden: Tensor | None,
    lora_b: Tensor | None,
    x: Tensor,
    weights: Sequence[Tensor],
    residual: Tensor | None = None,
) -> Tensor:
    """`x @ [W1; W2; ...].T + lora_hidden @ lora_b.T (+ residual)`: one GEMM where the weights are
    stacked, which accumulates onto LoRA's product. With a residual the result has its shape."""
    accumulates = lora_hidden is not None and residual is None
    if lora_hidden is not None and lora_b is not None and residual is None:
        y = lora_hidden @ lora_b.t()
    else:
        y = x.new_empty(len(x), sum(len(weight) for weight in weights))
    for columns, weight in _column_blocks(y, _as_one_matrix(weights)):
        torch.addmm(columns, x, weight.t(), beta=int(accumulates), out=columns)
    if residual is None:
        return y
    assert lora_hidden is not None
    assert lora_b is not None
    return add_lora_residual(y, lora_hidden, lora_b, residual)


@stacked_linear.register_fake
def _(
    lora_hidden: Tensor | None,
    lora_b: Tensor | None,
    x: Tensor,
    weights: Sequence[Tensor],
    residual: Tensor | None = None,
) -> Tensor:
    if residual is not None:
        return residual.new_empty(residual.shape)
    # Not `len(x)`: that would be a number, and what is compiled good for so many rows only.
    return x.new_empty(x.shape[0], sum(len(weight) for weight in weights))


@torch.library.custom_op("shardtune::stacked_linear_lora_a", mutates_args=())
def stacked_linear_lora_a(
    x: Tensor, lora_a: Tensor, weights: Sequence[Tensor], spare: int
) -> Tensor:
    """`x @ [W1; W2; ...; A].T`: the stacked layers and LoRA's x A^T, from one GEMM where `spare`
    rows have room for A."""
    y = empty_aligned(x, len(x), sum(len(weight) for weight in weights) + len(lora_a))
    stacked = _with_lora_a_below(weights, lora_a, spare)
    for columns, weight in _column_blocks(y, [*weights, lora_a] if stacked is None else [stacked]):
        torch.mm(x, weight.t(), out=columns)
    return y


@stacked_linear_lora_a.register_fake
def _(x: Tensor, lora_a: Tensor, weights: Sequence[Tensor], spare: int) -> Tensor:
    return empty_aligned(x, x.shape[0], sum(len(weight) for weight in weights) + len(lora_a))


@torch.library.custom_op("shardtune::stacked_linear_backward", mutates_args=())
def stacked_linear_backward(
    lora_hidden: Tensor | None,
    lora_a: Tensor | None,
    grad_output: Tensor,
    weights: Sequence[Tensor],
    spare: int = 0,
) -> Tensor:
    """The gradient of the input: `grad_output @ [W1; W2; ...] + lora_hidden @ lora_a`.
    `lora_hidden` (here its gradient) may be the last columns of `grad_output`: one GEMM then, where
    A has room."""
    rows = sum(len(weight) for weight in weights)
    if grad_output.shape[1] > rows and lora_a is not None:
        stacked = _with_lora_a_below(weights, lora_a, spare)
        if stacked is not None:
            return grad_output @ stacked
        grad_output, lora_hidden = grad_output[:, :rows], grad_output[:, rows:]
    accumulates = lora_hidden is not None
    if lora_hidden is None or lora_a is None:
        grad_input = grad_output.new_empty(len(grad_output), weights[0].shape[1])
    else:
        grad_input = lora_hidden @ lora_a
    for columns, weight in _column_blocks(grad_output, _as_one_matrix(weights)):
        torch.addmm(grad_input, columns, weight, beta=int(accumulates), out=grad_input)
        accumulates = True
    return grad_input


@stacked_linear_backward.register_fake
def _(
    lora_hidden: Tensor | None,
    lora_a: Tensor | None,
    grad_output: Tensor,
    weights: Sequence[Tensor],
    spare: int = 0,
) -> Tensor:
    return grad_output.new_empty(grad_output.shape[0], weights[0].shape[1])


def _as_one_matrix(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Weights that are below each other in memory, as one matrix; otherwise themselves."""
    first = weights[0]
    begin, wide = first.storage_offset(), first.shape[1]
    for weight in weights:
        apart = weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if apart or weight.storage_offset() != begin or not weight.is_contiguous():
            return weights
        begin += weight.numel()
    return [first.as_strided((sum(len(weight) for weight in weights), wide), (wide, 1))]


def _with_lora_a_below(weights: Sequence[Tensor], lora_a: Tensor, spare: int) -> Tensor | None:
    """The stacked weights with `lora_a` copied below them; None where there is no room. There is if
    the weights and `spare` rows are all that their buffer has. Nobody else sees these rows; but two
    threads that compute one layer with different adapters would see each other's."""
    one, *others = _as_one_matrix(weights)
    rows, wide = one.shape
    stacked = (rows + spare) * wide * one.element_size()
    alone = one.storage_offset() == 0 and one.untyped_storage().nbytes() == stacked
    if others or not alone or len(lora_a) > spare:
        return None
    # `data`: to autograd the weights, which it has seen, would be others from here on.
    matrix = one.data.as_strided((rows + len(lora_a), wide), (wide, 1))
    matrix[rows:].copy_(lora_a)
    return matrix


def _column_blocks(joint: Tensor, weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight with its columns of the result."""
    begin = 0
    for weight in weights:
        yield joint[:, begin : begin + len(weight)], weight
        begin += len(weight)
