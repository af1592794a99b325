"""DoRA in fused LoRA layers: each output gets a trained magnitude in place of its weights' norm.

    y_i = m_i / ||W_i + s (BA)_i|| * (W x + s BA x)_i

The norm counts as a constant in the backward pass, as in peft. There W + s BA is written out for
it, in each step; here its square is

    ||W_i||^2 + 2 s B_i . (W A^T)_i + s^2 B_i (A A^T) B_i^T

which reads W and writes nothing of its size. The factor itself is one more pointwise operation, for
the compiler to fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardtune.kernels.matmul_fp32_out import matmul_fp32_out
from shardtune.models.fused.known_source import forward_has
from shardtune.models.quantization.bitsandbytes_linear import dequantized
from shardtune.models.quantization.fp8_linear import FP8Linear

DORA_FORWARD = (
    "weight_norm = weight_norm.detach()",
    "mag_norm_scale = (magnitude / weight_norm).view(1, -1)",
    "result_dora = (mag_norm_scale - 1) * base_result + mag_norm_scale * lora_result * scaling",
)
"""What peft's DoRA computes, which `scale_by_magnitude` replaces."""


def why_not_dora(layer: Any, adapter: str) -> str:
    """Why a DoRA layer of peft can't be fused; nothing if it can."""
    from peft.tuners.lora.dora import DoraLinearLayer

    magnitude = layer.lora_magnitude_vector[adapter]
    if type(magnitude) is not DoraLinearLayer or not forward_has(
        DoraLinearLayer, DORA_FORWARD, lost="DoRA layers are not fused"
    ):
        return f"{type(magnitude).__name__} is not the DoRA that is known here"
    if not isinstance(layer.lora_dropout[adapter], nn.Identity):
        return "DoRA with dropout drops the frozen layer's input, too"
    if isinstance(layer.base_layer, FP8Linear):
        return "DoRA needs the norms of weights that are in 8 bits"
    return ""


def scale_by_magnitude(layer: Any, adapter: str, y: Tensor) -> Tensor:
    """What a LoRA layer gives without its bias, with its magnitudes."""
    lora_a, lora_b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    weight = dequantized(layer.base_layer)
    norm: Tensor = dora_row_norms(
        weight, lora_a.detach(), lora_b.detach(), float(layer.scaling[adapter])
    )
    magnitude: Tensor = layer.lora_magnitude_vector[adapter].weight
    return (y.float() * (magnitude.float() / norm)).to(y.dtype)


@torch.library.custom_op("shardtune::dora_row_norms", mutates_args=())
def dora_row_norms(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """`||W + s BA||` of each row, in fp32. One operation, whose result is saved: a layer that
    computes again what is cheap would read all weights once more."""
    a, b = lora_a.to(weight.dtype), scaling * lora_b.float()
    squares: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    crossed = (matmul_fp32_out(weight, a.t()) * b).sum(1)
    inner = (b @ matmul_fp32_out(a, a.t()) * b).sum(1)
    norms: Tensor = (squares + 2 * crossed + inner).clamp(min=0).sqrt()
    return norms


@dora_row_norms.register_fake
def _(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    return weight.new_empty(weight.shape[0], dtype=torch.float32)
