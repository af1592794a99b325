"""The backward pass of `silu(gate) * up`, where both stand side by side, as do their gradients.

A compiler would put them there in a pass of their own. The activation is made again beside them:
the gradient of the next weight wants it, and to keep it would take more than to compute it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None

BLOCK = 4096


@torch.library.custom_op("shardtune::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `y`, and the activation. `gradient` is that of the latter."""
    back, active = y.new_empty(y.shape), y.new_empty(gradient.shape)
    rows, half = gradient.shape
    if triton is None or not y.is_cuda:
        gate, up = y.float().chunk(2, dim=1)
        steep = torch.sigmoid(gate)
        smooth = gate * steep
        back[:, :half] = gradient * up * (steep + smooth * (1 - steep))
        back[:, half:] = gradient * smooth
        active.copy_(smooth * up)
    else:
        grid = (rows, triton.cdiv(half, BLOCK))
        _swiglu_backward[grid](
            gradient.contiguous(), y.contiguous(), back, active, half, BLOCK, num_warps=8
        )
    return back, active


@swiglu_backward.register_fake
def _(gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(gradient.shape)


def _swiglu_backward_kernel(gradient, y, back, active, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    left = row * 2 * half + column
    right = left + half
    here = row * half + column
    kind = back.dtype.element_ty
    g = tl.load(gradient + here, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(y + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + right, mask=inside, other=0.0).to(tl.float32)
    steep = tl.sigmoid(gate)
    smooth = gate * steep
    tl.store(back + left, (g * up * (steep + smooth * (1 - steep))).to(kind), mask=inside)
    tl.store(back + right, (g * smooth).to(kind), mask=inside)
    tl.store(active + here, (smooth * up).to(kind), mask=inside)


_swiglu_backward: Any = triton.jit(_swiglu_backward_kernel) if triton is not None else None
