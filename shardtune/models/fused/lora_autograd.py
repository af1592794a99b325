"""Autograd functions of linear layers with LoRA, in as few passes over memory as it takes.

    y = x W^T + (x A^T) B^T [+ residual]        h = x A^T is `lora_hidden`

Backward, with g the gradient of y (W is frozen, so it gets none):

    dh = g B        dx = g W + dh A        dA = dh^T x        dB = g^T h

A matmul with a rank-16 matrix costs what reading and writing its activations costs. Layers that
share an input share that: their A (and B) are stacked and multiplied at once, or together with the
frozen weights (`stacked_linear`). And nothing is added afterwards: the large product accumulates
into the small one's result inside the GEMM (beta = 1), forward and backward.

`lora_a` and `lora_b` may be in fp32 and get their gradients in it, though they are multiplied in
the dtype of the input. Weights are asked for once more in the backward pass, and not saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.matmul_fp32_out import matmul_fp32_out
from shardtune.kernels.rope import rope_qkv, rope_qkv_backward
from shardtune.kernels.stacked_linear import (
    LinearLayers,
    spare_rows,
    stacked_linear,
    stacked_linear_backward,
    stacked_linear_lora_a,
)
from shardtune.kernels.swiglu_lora import swiglu_lora, swiglu_lora_backward
from shardtune.models.quantization.fp8 import FP8Linear, fp8_linear, quantize_fp8_rowwise
from shardtune.models.quantization.linear import dequantized, dequantized_for_backward


class LoRALinear(torch.autograd.Function):
    """`x @ weights.T + x @ down.T @ up.T`. Added to what went `past` it, it has its shape."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, past: Tensor | None, layers: LinearLayers
    ) -> Tensor:
        down, up = down.to(x.dtype), up.to(x.dtype)
        narrow = x @ down.t()
        ctx.save_for_backward(x, narrow, down, up)
        ctx.layers = layers
        return _forwards(x, layers, narrow, up, past)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, down, up = ctx.saved_tensors
        gradient = _by_row(gradients[0])
        to_narrow = gradient @ up
        to_x = to_past = None
        if ctx.needs_input_grad[0]:
            to_x = _backwards(gradient, ctx.layers, to_narrow, down)
        if ctx.needs_input_grad[3]:
            to_past = gradients[0]
        to_down, to_up = matmul_fp32_out(to_narrow.t(), x), matmul_fp32_out(gradient.t(), narrow)
        return to_x, to_down, to_up, to_past, None


class LoRAQKVRoPE(torch.autograd.Function):
    """What `LoRALinear` makes of queries, keys and values, by head, the first two turned.

    Rows and their length come with `x`. If they came with the angles, a compiler that is told
    neither would ask the joint product for them on the way back, and keep it for that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, ...],
        layers: LinearLayers,
    ) -> tuple[Tensor, ...]:
        down, up = down.to(x.dtype), up.to(x.dtype)
        rows, length, _ = x.shape
        flat = _by_row(x)
        narrow = flat @ down.t()
        ctx.save_for_backward(x, narrow, down, up, cos, sin)
        ctx.layers = layers
        joint = _forwards(flat, layers, narrow, up)
        joint = joint.view(rows, length, joint.shape[1])
        parts: tuple[Tensor, ...] = rope_qkv(joint, cos, sin, heads)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, down, up, cos, sin = ctx.saved_tensors
        back = rope_qkv_backward(*gradients, cos, sin, up)
        gradient, to_narrow = back[:, : len(up)], back[:, len(up) :]
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = _backwards_beside(back, ctx.layers, down).view(x.shape)
        to_down, to_up = (
            matmul_fp32_out(to_narrow.t(), _by_row(x)),
            matmul_fp32_out(gradient.t(), narrow),
        )
        return to_x, to_down, to_up, None, None, None, None


class LoRASwiGLUMLP(torch.autograd.Function):
    """A gated MLP with adapters on all its layers. Added to what went `past` it, it has its shape.

    The activation isn't kept: the backward pass doesn't need it. `down` and `up` hold both matrices
    of the `first` layers, one below the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        last_down: Tensor,
        last_up: Tensor,
        past: Tensor | None,
        first: LinearLayers,
        last: LinearLayers,
    ) -> Tensor:
        matrices = [each.to(x.dtype) for each in (down, up, last_down, last_up)]
        down, up, last_down, last_up = matrices
        y, narrow = _opened(x, down, first)
        active, last_narrow = swiglu_lora(y, narrow, up, last_down)
        ctx.save_for_backward(x, y, narrow, last_narrow, *matrices)
        ctx.layers = first, last
        return _forwards(active, last, last_narrow, last_up, past)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, narrow, last_narrow, down, up, last_down, last_up = ctx.saved_tensors
        first, last = ctx.layers
        gradient = _by_row(gradients[0])
        to_last_narrow = gradient @ last_up
        to_active = _backwards(gradient, last, None, None)
        back, *to_two = swiglu_lora_backward(to_active, to_last_narrow, last_down, y, narrow, up)
        to_x = to_past = None
        if ctx.needs_input_grad[0]:
            to_x = _backwards_beside(back, first, down)
        if ctx.needs_input_grad[5]:
            to_past = gradients[0]
        to_down = matmul_fp32_out(back[:, y.shape[1] :].t(), x)
        return (
            to_x,
            to_down,
            *to_two,
            matmul_fp32_out(gradient.t(), last_narrow),
            to_past,
            None,
            None,
        )


def _by_row(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _forwards(
    x: Tensor,
    layers: LinearLayers,
    narrow: Tensor | None,
    up: Tensor | None,
    past: Tensor | None = None,
) -> Tensor:
    """`x @ weights.T + narrow @ up.T + past`."""
    y: Tensor
    if (whole := _in_8_bits(layers)) is not None:
        wide = None if up is None else up.t()
        y = fp8_linear(
            narrow, wide, *whole.quantize_input(x), *whole.forward_weights(), x.dtype, past
        )
    else:
        y = stacked_linear(narrow, up, x, [dequantized(layer) for layer in layers], past)
    return y


def _opened(x: Tensor, down: Tensor, layers: LinearLayers) -> tuple[Tensor, Tensor]:
    """`x @ weights.T` and `x @ down.T`."""
    if _in_8_bits(layers) is not None:
        return _forwards(x, layers, None, None), x @ down.t()
    y = stacked_linear_lora_a(x, down, [dequantized(layer) for layer in layers], spare_rows(layers))
    outputs = sum(layer.out_features for layer in layers)
    return y[:, :outputs], y[:, outputs:]


def _backwards(
    gradient: Tensor, layers: LinearLayers, narrow: Tensor | None, down: Tensor | None
) -> Tensor:
    """`narrow @ down + gradient @ weights`."""
    to_x: Tensor
    if (whole := _in_8_bits(layers)) is not None:
        to_x = fp8_linear(
            narrow, down, *quantize_fp8_rowwise(gradient), *whole.backward_weights(), gradient.dtype
        )
    else:
        weights = [dequantized_for_backward(layer, gradient) for layer in layers]
        to_x = stacked_linear_backward(narrow, down, gradient, weights)
    return to_x


def _backwards_beside(back: Tensor, layers: LinearLayers, down: Tensor) -> Tensor:
    """The same of a gradient with `narrow` beside it, as its last columns."""
    outputs = sum(layer.out_features for layer in layers)
    if _in_8_bits(layers) is not None:
        return _backwards(back[:, :outputs], layers, back[:, outputs:], down)
    weights = [dequantized_for_backward(layer, back) for layer in layers]
    to_x: Tensor = stacked_linear_backward(None, down, back, weights, spare_rows(layers))
    return to_x


def _in_8_bits(layers: LinearLayers) -> FP8Linear | None:
    """The one layer that stands for all of them, where they are in 8 bits."""
    first = layers[0]
    if not isinstance(first, FP8Linear):
        return None
    return first.stacked_in[0] if len(layers) > 1 else first
