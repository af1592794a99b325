"""Products of layers with one input. A compiler doesn't look into them, so what is kept for the
backward pass can be chosen product by product.

Weights that are multiplied with one input stand below each other in memory: there and back it is
one product then, instead of several that read and write the same numbers. Below them is room for
the first matrix of their adapters (`down`), so what it makes of the input comes out beside what
they make, and what goes back through it needs no product of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shardtune.kernels.lora_residual import add_lora_residual

LinearLayers = tuple[nn.Linear, ...]
"""Layers that have one input. Their outputs stand side by side."""
CACHE_LINE = 64
"""Of 16-bit numbers: 128 bytes."""


def stack_weights(layers: LinearLayers, room: int) -> None:
    """Puts the weights of layers with one input where a product finds them as one matrix, with so
    many rows to spare. They have to be whole, and on the device where they stay."""
    weights = [layer.weight.detach() for layer in layers]
    assert all(type(weight) is Tensor and weight.dim() == 2 for weight in weights)
    rows = [len(weight) for weight in weights]
    whole = weights[0].new_empty(sum(rows) + room, weights[0].shape[1])
    places = torch.split(whole, [*rows, room])
    for layer, weight, place in zip(layers, weights, places[:-1], strict=True):
        layer.weight.data = place.copy_(weight)
        layer.spare_rows = room  # type: ignore[assignment]


def spare_rows(layers: LinearLayers) -> int:
    """Rows to spare, as far as `stack_weights` had its way. Engines may move weights afterwards,
    so a product looks where they are."""
    return int(getattr(layers[-1], "spare_rows", 0))


def empty_aligned(like: Tensor, rows: int, columns: int) -> Tensor:
    """An empty matrix; on a GPU its rows begin where a line of the cache does, or a tile of 64
    columns would touch two of them. Elsewhere it is dense: oneDNN multiplies what lies behind the
    end of a row with zeros, which makes NaN of whatever is found there."""
    padded = -(-columns // CACHE_LINE) * CACHE_LINE if like.is_cuda else columns
    return like.new_empty(rows, padded)[:, :columns]


def cat_aligned(*parts: Tensor) -> Tensor:
    """Matrices in one that is `empty_aligned`, as a compiler is told that it is."""
    result = empty_aligned(parts[0], len(parts[0]), sum(part.shape[1] for part in parts))
    torch.cat(parts, dim=1, out=result)
    return result


@torch.library.custom_op("shardtune::stacked_linear", mutates_args=())
def stacked_linear(
    narrow: Tensor | None,
    up: Tensor | None,
    x: Tensor,
    weights: Sequence[Tensor],
    past: Tensor | None = None,
) -> Tensor:
    """`narrow @ up.T` (if there is any) plus the products with the weights, side by side. Where
    there is, it may be added to what went `past` them, and has its shape then."""
    begun = narrow is not None and past is None
    if narrow is not None and up is not None and past is None:
        y = narrow @ up.t()
    else:
        y = x.new_empty(len(x), sum(len(weight) for weight in weights))
    for columns, weight in _column_blocks(y, _as_one_matrix(weights)):
        torch.addmm(columns, x, weight.t(), beta=int(begun), out=columns)
    if past is None:
        return y
    assert narrow is not None
    assert up is not None
    return add_lora_residual(y, narrow, up, past)


@stacked_linear.register_fake
def _(
    narrow: Tensor | None,
    up: Tensor | None,
    x: Tensor,
    weights: Sequence[Tensor],
    past: Tensor | None = None,
) -> Tensor:
    if past is not None:
        return past.new_empty(past.shape)
    # Not `len(x)`: that would be a number, and what is compiled good for so many rows only.
    return x.new_empty(x.shape[0], sum(len(weight) for weight in weights))


@torch.library.custom_op("shardtune::stacked_linear_lora_a", mutates_args=())
def stacked_linear_lora_a(x: Tensor, down: Tensor, weights: Sequence[Tensor], room: int) -> Tensor:
    """The products with the weights, and the one with `down` beside them."""
    y = empty_aligned(x, len(x), sum(len(weight) for weight in weights) + len(down))
    whole = _with_lora_a_below(weights, down, room)
    for columns, weight in _column_blocks(y, [*weights, down] if whole is None else [whole]):
        torch.mm(x, weight.t(), out=columns)
    return y


@stacked_linear_lora_a.register_fake
def _(x: Tensor, down: Tensor, weights: Sequence[Tensor], room: int) -> Tensor:
    return empty_aligned(x, x.shape[0], sum(len(weight) for weight in weights) + len(down))


@torch.library.custom_op("shardtune::stacked_linear_backward", mutates_args=())
def stacked_linear_backward(
    narrow: Tensor | None,
    down: Tensor | None,
    gradient: Tensor,
    weights: Sequence[Tensor],
    room: int = 0,
) -> Tensor:
    """`narrow @ down` (if there is any) plus the products with the weights, added up. `narrow` may
    stand beside the gradient, as its last columns."""
    rows = sum(len(weight) for weight in weights)
    if gradient.shape[1] > rows and down is not None:
        whole = _with_lora_a_below(weights, down, room)
        if whole is not None:
            return gradient @ whole
        gradient, narrow = gradient[:, :rows], gradient[:, rows:]
    begun = narrow is not None
    if narrow is None or down is None:
        to_x = gradient.new_empty(len(gradient), weights[0].shape[1])
    else:
        to_x = narrow @ down
    for columns, weight in _column_blocks(gradient, _as_one_matrix(weights)):
        torch.addmm(to_x, columns, weight, beta=int(begun), out=to_x)
        begun = True
    return to_x


@stacked_linear_backward.register_fake
def _(
    narrow: Tensor | None,
    down: Tensor | None,
    gradient: Tensor,
    weights: Sequence[Tensor],
    room: int = 0,
) -> Tensor:
    return gradient.new_empty(gradient.shape[0], weights[0].shape[1])


def _as_one_matrix(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Weights that stand below each other in memory, as one."""
    first = weights[0]
    begin, wide = first.storage_offset(), first.shape[1]
    for weight in weights:
        apart = weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if apart or weight.storage_offset() != begin or not weight.is_contiguous():
            return weights
        begin += weight.numel()
    return [first.as_strided((sum(len(weight) for weight in weights), wide), (wide, 1))]


def _with_lora_a_below(weights: Sequence[Tensor], down: Tensor, room: int) -> Tensor | None:
    """All weights with `down` below them; None where there is no room for it. There is if the
    weights and `room` rows are all that their piece of memory has. Nobody else sees these rows; but
    two threads that compute one layer with different adapters would see each other's."""
    one, *others = _as_one_matrix(weights)
    rows, wide = one.shape
    whole = (rows + room) * wide * one.element_size()
    alone = one.storage_offset() == 0 and one.untyped_storage().nbytes() == whole
    if others or not alone or len(down) > room:
        return None
    # `data`: to autograd the weights, which it has seen, would be others from here on.
    matrix = one.data.as_strided((rows + len(down), wide), (wide, 1))
    matrix[rows:].copy_(down)
    return matrix


def _column_blocks(joint: Tensor, weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight with its columns of the joint result."""
    begin = 0
    for weight in weights:
        yield joint[:, begin : begin + len(weight)], weight
        begin += len(weight)
