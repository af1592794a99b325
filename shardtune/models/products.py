"""Products with frozen weights and LoRA beside them, in as few passes over memory as it takes.

A product of a rank-16 matrix costs what reading and writing its activations costs. Layers with one
input share that: their small matrices stand below (or beside) each other and are multiplied at
once. And nothing is added afterwards: the large product is added to the small one's result inside
the matrix unit, in the forward pass as in the backward pass.

The compiler doesn't look into the large products, so what is kept for the backward pass can be
chosen product by product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.models.fp8 import FP8Linear, by_row, scaled
from shardtune.models.gated import gated, gated_back
from shardtune.models.quantise import restored, restored_after
from shardtune.models.unrounded import in_fp32

Layers = tuple[nn.Linear, ...]
"""Frozen layers that have one input. Their outputs stand side by side."""


class Adapted(torch.autograd.Function):
    """`x @ weights.T + x @ down.T @ up.T`.

    `down` and `up` may be in fp32 and get their gradients in it, though they are multiplied in the
    precision of `x`. Weights are asked for once more in the backward pass, and not kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, layers: Layers) -> Tensor:
        down, up = down.to(x.dtype), up.to(x.dtype)
        narrow = x @ down.t()
        ctx.save_for_backward(x, narrow, down, up)
        ctx.layers = layers
        return _forwards(x, layers, narrow, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, down, up = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_narrow = gradient @ up
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = _backwards(gradient, ctx.layers, to_narrow, down)
        return to_x, in_fp32(to_narrow.t(), x), in_fp32(gradient.t(), narrow), None


class Opening(torch.autograd.Function):
    """`x @ weights.T` and `x @ down.T`, for whoever adds what LoRA makes of the latter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
        down = down.to(x.dtype)
        ctx.save_for_backward(x, down)
        ctx.layers = layers
        return _forwards(x, layers, None, None), x @ down.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, down = ctx.saved_tensors
        gradient, to_narrow = gradients
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = _backwards(gradient.contiguous(), ctx.layers, to_narrow, down)
        return to_x, in_fp32(to_narrow.t(), x), None


class Closing(torch.autograd.Function):
    """What follows an `Opening` in an MLP: LoRA's part, the activation, and the last product with
    an adapter of its own (`last_down`, `last_up`). The activation isn't kept: the backward pass
    doesn't need it. `up` holds both matrices, one below the other."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        narrow: Tensor,
        up: Tensor,
        last_down: Tensor,
        last_up: Tensor,
        layers: Layers,
    ) -> Tensor:
        up, last_down, last_up = (each.to(y.dtype) for each in (up, last_down, last_up))
        active, last_narrow = gated(y, narrow, up, last_down)
        ctx.save_for_backward(y, narrow, up, last_narrow, last_down, last_up)
        ctx.layers = layers
        return _forwards(active, layers, last_narrow, last_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, narrow, up, last_narrow, last_down, last_up = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_last_narrow = gradient @ last_up
        to_active = _backwards(gradient, ctx.layers, None, None)
        back = gated_back(to_active, to_last_narrow, last_down, y, narrow, up)
        return *back, in_fp32(gradient.t(), last_narrow), None


def _forwards(x: Tensor, layers: Layers, narrow: Tensor | None, up: Tensor | None) -> Tensor:
    """`narrow @ up.T + x @ weights.T`."""
    y: Tensor
    if (whole := _in_8_bits(layers)) is not None:
        wide = None if up is None else up.t()
        y = scaled(narrow, wide, *by_row(x), *whole.forwards(), x.dtype)
    else:
        y = across(narrow, up, x, [restored(layer) for layer in layers])
    return y


def _backwards(
    gradient: Tensor, layers: Layers, narrow: Tensor | None, down: Tensor | None
) -> Tensor:
    """`narrow @ down + gradient @ weights`."""
    to_x: Tensor
    if (whole := _in_8_bits(layers)) is not None:
        to_x = scaled(narrow, down, *by_row(gradient), *whole.backwards(), gradient.dtype)
    else:
        weights = [restored_after(layer, gradient) for layer in layers]
        to_x = back_across(narrow, down, gradient, weights)
    return to_x


def _in_8_bits(layers: Layers) -> FP8Linear | None:
    """The one layer that stands for all of them, where they are in 8 bits."""
    first = layers[0]
    if not isinstance(first, FP8Linear):
        return None
    return first.home[0] if len(layers) > 1 else first


@torch.library.custom_op("shardtune::across", mutates_args=())
def across(
    narrow: Tensor | None, up: Tensor | None, x: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    """`narrow @ up.T` (if there is any) plus the products with the weights, side by side."""
    if narrow is None or up is None:
        y = x.new_empty(len(x), sum(len(weight) for weight in weights))
    else:
        y = narrow @ up.t()
    for columns, weight in _beside(y, weights):
        torch.addmm(columns, x, weight.t(), beta=int(narrow is not None), out=columns)
    return y


@across.register_fake
def _(narrow: Tensor | None, up: Tensor | None, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    # Not `len(x)`: that would be a number, and what is compiled good for so many rows only.
    return x.new_empty(x.shape[0], sum(len(weight) for weight in weights))


@torch.library.custom_op("shardtune::back_across", mutates_args=())
def back_across(
    narrow: Tensor | None, down: Tensor | None, gradient: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    """`narrow @ down` (if there is any) plus the products with the weights, added up."""
    if narrow is None or down is None:
        to_x = gradient.new_empty(len(gradient), weights[0].shape[1])
    else:
        to_x = narrow @ down
    begun = narrow is not None
    for columns, weight in _beside(gradient, weights):
        torch.addmm(to_x, columns, weight, beta=int(begun), out=to_x)
        begun = True
    return to_x


@back_across.register_fake
def _(
    narrow: Tensor | None, down: Tensor | None, gradient: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    return gradient.new_empty(gradient.shape[0], weights[0].shape[1])


def _beside(joint: Tensor, weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight with its columns of the joint result."""
    begin = 0
    for weight in weights:
        yield joint[:, begin : begin + len(weight)], weight
        begin += len(weight)
