"""Experts in FP8: a byte for each weight and a scale for each output of each expert, restored to 16
bits for each product.

A linear layer in FP8 (`fp8_linear.py`) is multiplied in 8 bits and holds its weights twice, for
either direction. Grouped products have 16-bit inputs here, so one copy serves both, and experts
take half of what they take in bf16. Weights are rounded to the nearest: the router decides which
tokens an expert gets, so that few samples would tell little of most experts' inputs, and
calibration (`calibration.py`) leaves experts alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardtune.engine.dtensor import local
from shardtune.models.experts.grouped_experts import become
from shardtune.models.quantization.bitsandbytes_linear import for_backward
from shardtune.models.quantization.fp8_linear import describe_fp8_matmul, has_fp8_matmul
from shardtune.models.quantization.gptq import E4M3, E4M3_MAX
from shardtune.models.quantization.quantized_experts import QuantizedExperts


class FP8Experts(QuantizedExperts):
    """Grouped experts whose matrices are (experts, outputs, inputs) in e4m3, whichever way
    transformers lays them out; each weight's scales (experts, outputs, 1) are a parameter beside
    it."""

    def quantize(self, name: str, weight: Tensor) -> None:
        matrices = weight.transpose(-2, -1) if self.is_transposed else weight
        small, scales = quantize_matrices(matrices, self.compute_dtype)
        self._parameters[name] = nn.Parameter(small, requires_grad=False)
        self._parameters[_scales(name)] = nn.Parameter(scales, requires_grad=False)

    def dequantize(self, name: str) -> Tensor:
        found = self.matrix(name)
        return found.transpose(-2, -1).contiguous() if self.is_transposed else found

    def plain_shape(self, name: str) -> torch.Size:
        experts, outputs, inputs = getattr(self, name).shape
        last = (inputs, outputs) if self.is_transposed else (outputs, inputs)
        return torch.Size((experts, *last))

    def quantized(self) -> tuple[str, ...]:
        names = tuple(self._parameters)
        return tuple(name for name in names if _scales(name) in names)

    def unpack(self) -> None:
        names = self.quantized()
        super().unpack()
        for name in names:
            del self._parameters[_scales(name)]

    def matrix(self, name: str) -> Tensor:
        return self._restored(local(getattr(self, name)), name)

    def matrix_for_backward(self, name: str, gradient: Tensor) -> Tensor:
        return self._restored(for_backward(local(getattr(self, name)), gradient), name)

    def _restored(self, small: Tensor, name: str) -> Tensor:
        found = small.to(self.compute_dtype)
        found *= local(getattr(self, _scales(name)))  # in place: there is no second copy in 16 bits
        return found


def quantize_matrices(matrices: Tensor, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrices (experts, outputs, inputs) in e4m3, and a scale for each output, `s = max|w| / 448`,
    in the dtype that they are restored to."""
    small = matrices.new_empty(matrices.shape, dtype=E4M3)
    scales = matrices.new_empty((*matrices.shape[:2], 1), dtype=compute_dtype)
    smallest = torch.finfo(compute_dtype).tiny  # a row of zeros is divided by it
    for matrix, stored, scale in zip(matrices, small, scales, strict=True):
        exact = matrix.to(compute_dtype).float()  # of one expert at a time, which is little
        # The scale is rounded before it is used, so its rounding costs nothing.
        scale.copy_((exact.abs().amax(1, keepdim=True) / E4M3_MAX).clamp_min(smallest))
        stored.copy_((exact / scale.float()).clamp(-E4M3_MAX, E4M3_MAX))
    return small, scales


def hold_in_fp8(module: Any, compute_dtype: torch.dtype) -> None:
    """Lets a module of frozen experts hold its matrices in FP8 as soon as it is given them."""
    become(module, FP8Experts, compute_dtype)


def describe_fp8(model: nn.Module, device: str) -> str:
    """In words, how the frozen weights of a model in FP8 are stored and multiplied."""
    told = describe_fp8_matmul(device)
    if has_fp8_matmul(device) and any(isinstance(each, FP8Experts) for each in model.modules()):
        told += "; experts: stored in fp8, multiplied in bf16, which saves memory but no time"
    return told


def _scales(name: str) -> str:
    return f"{name}_scales"
