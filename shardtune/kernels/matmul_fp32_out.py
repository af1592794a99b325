"""Matmul of 16-bit operands with fp32 output: gradients of weights that are held in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("shardtune::matmul_fp32_out", mutates_args=())
def matmul_fp32_out(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` as tensor cores accumulate it, in fp32, without the rounding to 16 bits."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@matmul_fp32_out.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)
