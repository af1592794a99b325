"""Autograd functions of linear layers with LoRA, in as few passes over memory as it takes.

    y = x W^T + (x A^T) B^T [+ residual]        h = x A^T is `lora_hidden`

Backward, with g the gradient of y (W is frozen, so it gets none):

    dh = g B        dx = g W + dh A        dA = dh^T x        dB = g^T h

A matmul with a rank-16 matrix costs what reading and writing its activations costs. Layers that
share an input share that: their A (and B) are stacked and multiplied at once, or together with the
frozen weights (`stacked_linear`). And nothing is added afterwards: the large product accumulates
into the small one's result inside the GEMM (beta = 1), forward and backward.

With a `seed` LoRA has dropout on its input, of probability p, and every layer a mask of its own
(`lora_dropout.py`): h and the gradients around it have kernels of their own then.

`lora_a` and `lora_b` may be in fp32 and get their gradients in it, though they are multiplied in
the dtype of the input. Weights are asked for once more in the backward pass, and not saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.lora_dropout import (
    add_dropout_lora_a_grad,
    dropout_lora_a,
    dropout_lora_a_weight_grad,
)
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
from shardtune.models.quantization.bitsandbytes_linear import dequantized, dequantized_for_backward
from shardtune.models.quantization.fp8_linear import FP8Linear, fp8_linear, quantize_fp8_rowwise


class LoRALinear(torch.autograd.Function):
    """`x W^T + (x A^T) B^T`, plus the residual if there is one, in its shape then."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        residual: Tensor | None,
        layers: LinearLayers,
        seed: Tensor | None = None,
        p: float = 0.0,
    ) -> Tensor:
        lora_a, lora_b = lora_a.to(x.dtype), lora_b.to(x.dtype)
        lora_hidden = _lora_hidden(x, lora_a, seed, p, len(layers))
        ctx.save_for_backward(x, lora_hidden, lora_a, lora_b, seed)
        ctx.layers, ctx.p = layers, p
        return _linear_lora(x, layers, lora_hidden, lora_b, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_hidden, lora_a, lora_b, seed = ctx.saved_tensors
        grad_output = _flatten_tokens(gradients[0])
        grad_hidden = grad_output @ lora_b
        grad_x = grad_residual = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_input(grad_output, ctx.layers, grad_hidden, lora_a, seed, ctx.p)
        if ctx.needs_input_grad[3]:
            grad_residual = gradients[0]
        grad_lora_a = _grad_lora_a(grad_hidden, x, seed, ctx.p, len(ctx.layers))
        grad_lora_b = matmul_fp32_out(grad_output.t(), lora_hidden)
        return grad_x, grad_lora_a, grad_lora_b, grad_residual, None, None, None


class LoRAQKVRoPE(torch.autograd.Function):
    """Q, K and V with LoRA, split by head, with RoPE.

    Batch and length come from `x`. If they came from cos, a compiler with dynamic shapes would ask
    the stacked QKV output for them in the backward pass, and save it for that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, ...],
        layers: LinearLayers,
        seed: Tensor | None = None,
        p: float = 0.0,
    ) -> tuple[Tensor, ...]:
        lora_a, lora_b = lora_a.to(x.dtype), lora_b.to(x.dtype)
        rows, length, _ = x.shape
        flat = _flatten_tokens(x)
        lora_hidden = _lora_hidden(flat, lora_a, seed, p, len(layers))
        ctx.save_for_backward(x, lora_hidden, lora_a, lora_b, cos, sin, seed)
        ctx.layers, ctx.p = layers, p
        qkv = _linear_lora(flat, layers, lora_hidden, lora_b)
        qkv = qkv.view(rows, length, qkv.shape[1])
        parts: tuple[Tensor, ...] = rope_qkv(qkv, cos, sin, heads)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_hidden, lora_a, lora_b, cos, sin, seed = ctx.saved_tensors
        grads = rope_qkv_backward(*gradients, cos, sin, lora_b)
        grad_output, grad_hidden = grads[:, : len(lora_b)], grads[:, len(lora_b) :]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_input_beside(grads, ctx.layers, lora_a, seed, ctx.p).view(x.shape)
        grad_lora_a = _grad_lora_a(grad_hidden, _flatten_tokens(x), seed, ctx.p, len(ctx.layers))
        grad_lora_b = matmul_fp32_out(grad_output.t(), lora_hidden)
        return grad_x, grad_lora_a, grad_lora_b, None, None, None, None, None, None


class LoRASwiGLUMLP(torch.autograd.Function):
    """A SwiGLU MLP with LoRA on all its layers, plus the residual if there is one.

    The activation isn't saved: the backward pass recomputes it. `lora_a` and `lora_b` hold both
    matrices of the `gate_up` layers, one below the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        next_lora_a: Tensor,
        next_lora_b: Tensor,
        residual: Tensor | None,
        gate_up: LinearLayers,
        down: LinearLayers,
        seed: Tensor | None = None,
        next_seed: Tensor | None = None,
        p: float = 0.0,
    ) -> Tensor:
        matrices = [each.to(x.dtype) for each in (lora_a, lora_b, next_lora_a, next_lora_b)]
        lora_a, lora_b, next_lora_a, next_lora_b = matrices
        if seed is None:
            y, lora_hidden = _linear_and_lora_a(x, lora_a, gate_up)
        else:
            y = _linear_lora(x, gate_up, None, None)
            lora_hidden = _lora_hidden(x, lora_a, seed, p, len(gate_up))
        activation, next_lora_hidden = swiglu_lora(
            y, lora_hidden, lora_b, next_lora_a, next_seed, p
        )
        ctx.save_for_backward(x, y, lora_hidden, next_lora_hidden, *matrices, seed, next_seed)
        ctx.layers, ctx.p = (gate_up, down), p
        return _linear_lora(activation, down, next_lora_hidden, next_lora_b, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, lora_hidden, next_lora_hidden, *matrices, seed, next_seed = ctx.saved_tensors
        lora_a, lora_b, next_lora_a, next_lora_b = matrices
        gate_up, down = ctx.layers
        grad_output = _flatten_tokens(gradients[0])
        grad_next_hidden = grad_output @ next_lora_b
        grad_activation = _linear_lora_backward(grad_output, down, None, None)
        grads, *grad_small = swiglu_lora_backward(
            grad_activation, grad_next_hidden, next_lora_a, y, lora_hidden, lora_b, next_seed, ctx.p
        )
        grad_x = grad_residual = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_input_beside(grads, gate_up, lora_a, seed, ctx.p)
        if ctx.needs_input_grad[5]:
            grad_residual = gradients[0]
        grad_lora_a = _grad_lora_a(grads[:, y.shape[1] :], x, seed, ctx.p, len(gate_up))
        return (
            grad_x,
            grad_lora_a,
            *grad_small,
            matmul_fp32_out(grad_output.t(), next_lora_hidden),
            grad_residual,
            *(None,) * 5,
        )


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _linear_lora(
    x: Tensor,
    layers: LinearLayers,
    lora_hidden: Tensor | None,
    lora_b: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """`x @ weights.T + lora_hidden @ lora_b.T + residual`."""
    y: Tensor
    if (fp8 := _fp8_layer(layers)) is not None:
        b_t = None if lora_b is None else lora_b.t()
        y = fp8_linear(
            lora_hidden, b_t, *fp8.quantize_input(x), *fp8.forward_weights(), x.dtype, residual
        )
    else:
        y = stacked_linear(
            lora_hidden, lora_b, x, [dequantized(layer) for layer in layers], residual
        )
    return y


def _lora_hidden(x: Tensor, lora_a: Tensor, seed: Tensor | None, p: float, layers: int) -> Tensor:
    """`x A^T` of stacked layers, with dropout where there is a seed."""
    if seed is None:
        return x @ lora_a.t()
    hidden: Tensor = dropout_lora_a(x, lora_a, seed, p, layers)
    return hidden


def _grad_lora_a(
    grad_hidden: Tensor, x: Tensor, seed: Tensor | None, p: float, layers: int
) -> Tensor:
    """`grad_hidden^T x`, with the dropout that x had."""
    gradient: Tensor
    if seed is None:
        gradient = matmul_fp32_out(grad_hidden.t(), x)
    else:
        gradient = dropout_lora_a_weight_grad(grad_hidden, x, seed, p, layers)
    return gradient


def _grad_input(
    grad_output: Tensor,
    layers: LinearLayers,
    grad_hidden: Tensor,
    lora_a: Tensor,
    seed: Tensor | None,
    p: float,
) -> Tensor:
    """The gradient of x: through the weights, and through A and its dropout."""
    if seed is None:
        return _linear_lora_backward(grad_output, layers, grad_hidden, lora_a)
    grad_x = _linear_lora_backward(grad_output, layers, None, None)
    whole: Tensor = add_dropout_lora_a_grad(grad_x, grad_hidden, lora_a, seed, p, len(layers))
    return whole


def _grad_input_beside(
    grads: Tensor, layers: LinearLayers, lora_a: Tensor, seed: Tensor | None, p: float
) -> Tensor:
    """The same of a gradient with `lora_hidden`'s beside it, as its last columns."""
    if seed is None:
        return _linear_lora_backward_beside(grads, layers, lora_a)
    outputs = sum(layer.out_features for layer in layers)
    return _grad_input(grads[:, :outputs], layers, grads[:, outputs:], lora_a, seed, p)


def _linear_and_lora_a(x: Tensor, lora_a: Tensor, layers: LinearLayers) -> tuple[Tensor, Tensor]:
    """`x @ weights.T` and `x @ lora_a.T`."""
    if _fp8_layer(layers) is not None:
        return _linear_lora(x, layers, None, None), x @ lora_a.t()
    y = stacked_linear_lora_a(
        x, lora_a, [dequantized(layer) for layer in layers], spare_rows(layers)
    )
    outputs = sum(layer.out_features for layer in layers)
    return y[:, :outputs], y[:, outputs:]


def _linear_lora_backward(
    grad_output: Tensor, layers: LinearLayers, lora_hidden: Tensor | None, lora_a: Tensor | None
) -> Tensor:
    """`lora_hidden @ lora_a + grad_output @ weights`."""
    grad_x: Tensor
    if (fp8 := _fp8_layer(layers)) is not None:
        grad_x = fp8_linear(
            lora_hidden,
            lora_a,
            *quantize_fp8_rowwise(grad_output),
            *fp8.backward_weights(),
            grad_output.dtype,
        )
    else:
        weights = [dequantized_for_backward(layer, grad_output) for layer in layers]
        grad_x = stacked_linear_backward(lora_hidden, lora_a, grad_output, weights)
    return grad_x


def _linear_lora_backward_beside(grads: Tensor, layers: LinearLayers, lora_a: Tensor) -> Tensor:
    """The same of a gradient with `lora_hidden`'s beside it, as its last columns."""
    outputs = sum(layer.out_features for layer in layers)
    if _fp8_layer(layers) is not None:
        return _linear_lora_backward(grads[:, :outputs], layers, grads[:, outputs:], lora_a)
    weights = [dequantized_for_backward(layer, grads) for layer in layers]
    grad_x: Tensor = stacked_linear_backward(None, lora_a, grads, weights, spare_rows(layers))
    return grad_x


def _fp8_layer(layers: LinearLayers) -> FP8Linear | None:
    """The FP8 layer that holds the weights of all of them; None where they aren't FP8."""
    first = layers[0]
    if not isinstance(first, FP8Linear):
        return None
    return first.stacked_in[0] if len(layers) > 1 else first
