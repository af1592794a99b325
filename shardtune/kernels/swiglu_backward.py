"""SwiGLU backward: the gradient of `silu(gate) * up`, with gate and up side by side.

    s = sigmoid(gate)    dgate = g * up * (s + silu(gate) * (1 - s))    dup = g * silu(gate)

One pass reads g, gate and up and writes [dgate | dup] as the one matrix that the next GEMM takes (a
compiler would concatenate in a pass of its own), and the activation: the gradient of the next
weight wants it, and recomputing it here is cheaper than saving it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardtune.kernels.triton_import import jit, tl, triton

_BLOCK = 4096


@torch.library.custom_op("shardtune::swiglu_backward", mutates_args=())
def swiglu_backward(grad_output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `y = [gate | up]`, and the activation `silu(gate) * up`, recomputed."""
    grad_y, activation = y.new_empty(y.shape), y.new_empty(grad_output.shape)
    rows, half = grad_output.shape
    if triton is None or not y.is_cuda:
        gate, up = y.float().chunk(2, dim=1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_y[:, :half] = grad_output * up * (sigmoid + silu * (1 - sigmoid))
        grad_y[:, half:] = grad_output * silu
        activation.copy_(silu * up)
    else:
        grid = (rows, triton.cdiv(half, _BLOCK))
        _swiglu_backward[grid](
            grad_output.contiguous(), y.contiguous(), grad_y, activation, half, _BLOCK, num_warps=8
        )
    return grad_y, activation


@swiglu_backward.register_fake
def _(grad_output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(grad_output.shape)


def _swiglu_backward_kernel(grad_output, y, grad_y, activation, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    left = row * 2 * half + column
    right = left + half
    here = row * half + column
    kind = grad_y.dtype.element_ty
    g = tl.load(grad_output + here, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(y + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + right, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(grad_y + left, (g * up * (sigmoid + silu * (1 - sigmoid))).to(kind), mask=inside)
    tl.store(grad_y + right, (g * silu).to(kind), mask=inside)
    tl.store(activation + here, (silu * up).to(kind), mask=inside)


_swiglu_backward = jit(_swiglu_backward_kernel)
