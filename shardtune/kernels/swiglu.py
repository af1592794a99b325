"""SwiGLU, `silu(gate) * up` with gate and up side by side, forward and backward in one pass each.

    s = sigmoid(gate)    dgate = g * up * (s + silu(gate) * (1 - s))    dup = g * silu(gate)

The backward pass reads g, gate and up and writes [dgate | dup] as the one matrix that the next GEMM
takes (a compiler would concatenate in a pass of its own), and the activation: the gradient of the
next weight wants it, and recomputing it here is cheaper than saving it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shardtune.kernels.triton_import import jit, tl, triton

_BLOCK = 4096


def swiglu(y: Tensor) -> Tensor:
    """`silu(gate) * up` of `y = [gate | up]`."""
    rows, half = len(y), y.shape[1] // 2
    if triton is None or not y.is_cuda:
        gate, up = y.chunk(2, dim=1)
        return functional.silu(gate) * up
    activation = y.new_empty(rows, half)
    grid = (rows, triton.cdiv(half, _BLOCK))
    _swiglu[grid](y.contiguous(), activation, half, _BLOCK, num_warps=8)
    return activation


@torch.library.custom_op("shardtune::swiglu_backward", mutates_args=())
def swiglu_backward(grad_output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `y = [gate | up]`, and the activation `silu(gate) * up`, recomputed."""
    grad_y = y.new_empty(y.shape)
    return grad_y, swiglu_backward_into(grad_y, grad_output, y)


@swiglu_backward.register_fake
def _(grad_output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(grad_output.shape)


def swiglu_backward_into(grad_y: Tensor, grad_output: Tensor, y: Tensor) -> Tensor:
    """Writes the gradient of `y` into the columns of `grad_y`, whose rows may be longer; returns
    the activation."""
    rows, half = grad_output.shape
    activation = y.new_empty(rows, half)
    if triton is None or not y.is_cuda:
        gate, up = y.float().chunk(2, dim=1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_y[:, :half] = grad_output * up * (sigmoid + silu * (1 - sigmoid))
        grad_y[:, half:] = grad_output * silu
        return activation.copy_(silu * up)
    grid = (rows, triton.cdiv(half, _BLOCK))
    _swiglu_backward[grid](
        grad_output.contiguous(), y.contiguous(), grad_y, activation, half, grad_y.stride(0),
        _BLOCK, num_warps=8,
    )  # fmt: skip
    return activation


def _swiglu_kernel(y, activation, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    left = row * 2 * half + column
    gate = tl.load(y + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + left + half, mask=inside, other=0.0).to(tl.float32)
    value = (gate * tl.sigmoid(gate) * up).to(activation.dtype.element_ty)
    tl.store(activation + row * half + column, value, mask=inside)


def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad_output, y, grad_y, activation, half, grad_row, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    left = row * 2 * half + column
    back = row * grad_row + column
    here = row * half + column
    kind = grad_y.dtype.element_ty
    g = tl.load(grad_output + here, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(y + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + left + half, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(grad_y + back, (g * up * (sigmoid + silu * (1 - sigmoid))).to(kind), mask=inside)
    tl.store(grad_y + back + half, (g * silu).to(kind), mask=inside)
    tl.store(activation + here, (silu * up).to(kind), mask=inside)


_swiglu = jit(_swiglu_kernel)
_swiglu_backward = jit(_swiglu_backward_kernel)
