"""Products with frozen weights and LoRA beside them, in as few passes over memory as it takes.

A product of a rank-16 matrix costs what reading and writing its activations costs. Layers with one
input share that: their small matrices stand below (or beside) each other and are multiplied at
once. And nothing is ever added afterwards: the large product is added to the small one's result
inside the matrix unit, in the forward pass as in the backward pass.

All of it is two operations that a compiler doesn't look into, so that what is kept for the backward
pass can be chosen product by product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.models.quantise import restored, restored_after


class Adapted(torch.autograd.Function):
    """`x @ cat(weights).T + x @ down.T @ up.T` for frozen layers that stand side by side.

    `down` and `up` may be in fp32 and get their gradients in it, though they are multiplied in the
    precision of `x`. Weights are asked for once more in the backward pass, and not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, layers: tuple[nn.Linear, ...]
    ) -> Tensor:
        first, second = down.to(x.dtype), up.to(x.dtype)
        y, narrow = adapted(x, [restored(layer) for layer in layers], first, second)
        ctx.save_for_backward(x, narrow, first, second)
        ctx.layers = layers
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, down, up = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        wanted = ctx.needs_input_grad[0]
        weights = [restored_after(layer, gradient) for layer in ctx.layers] if wanted else []
        to_x, to_down, to_up = adapted_back(gradient, x, narrow, weights, down, up)
        return to_x if wanted else None, to_down, to_up, None


@torch.library.custom_op("shardtune::adapted", mutates_args=())
def adapted(x: Tensor, weights: Sequence[Tensor], down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and what is between `down` and `up`."""
    narrow = x @ down.t()
    y = narrow @ up.t()
    for columns, weight in _beside(y, weights):
        columns.addmm_(x, weight.t())
    return y, narrow


@adapted.register_fake
def _(x: Tensor, weights: Sequence[Tensor], down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(up)), x.new_empty(len(x), len(down))


@torch.library.custom_op("shardtune::adapted_back", mutates_args=())
def adapted_back(
    gradient: Tensor,
    x: Tensor,
    narrow: Tensor,
    weights: Sequence[Tensor],
    down: Tensor,
    up: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x` (none without weights: nobody asks for it), `down` and `up`."""
    to_narrow = gradient @ up
    to_x = to_narrow @ down if weights else gradient.new_empty(0)
    for columns, weight in _beside(gradient, weights):
        to_x.addmm_(columns, weight)
    return to_x, in_fp32(to_narrow.t(), x), in_fp32(gradient.t(), narrow)


@adapted_back.register_fake
def _(
    gradient: Tensor,
    x: Tensor,
    narrow: Tensor,
    weights: Sequence[Tensor],
    down: Tensor,
    up: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    to_x = torch.empty_like(x) if weights else gradient.new_empty(0)
    to_down, to_up = (torch.empty_like(each, dtype=torch.float32) for each in (down, up))
    return to_x, to_down, to_up


def _beside(joint: Tensor, weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight with its columns of the joint result."""
    begin = 0
    for weight in weights:
        yield joint[:, begin : begin + len(weight)], weight
        begin += len(weight)


def in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """The product as the matrix unit sums it up, not rounded to 16 bits."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()
