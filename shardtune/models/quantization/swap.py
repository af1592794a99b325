"""Puts quantized linear layers in the place of a model's own: which layers, and as what."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardtune.core.model.quantized_size import require_quantizable
from shardtune.core.setup import Quantization
from shardtune.models.expert_layers import modules_of_routers
from shardtune.models.experts.grouped_experts import expert_matrices, require_known_experts
from shardtune.models.quantization.bitsandbytes_linear import (
    Int8Linear,
    NF4Linear,
    QuantizedLinear,
)
from shardtune.models.quantization.fp8_experts import hold_in_fp8
from shardtune.models.quantization.fp8_linear import FP8Linear
from shardtune.models.quantization.nf4_experts import hold_in_nf4
from shardtune.models.quantization.quantized_experts import QuantizedExperts


def quantizable(
    parts: Iterable[nn.Module], kept: Iterable[str], kind: Quantization = "nf4"
) -> set[nn.Module]:
    """The linear layers and the experts in `parts`, without those that lie in a module called as
    one of `kept`.

    The output head lies in no part, so it is never among them. Nor is the last projection of a
    state-space layer (Mamba), whose kernels multiply with its weight themselves, nor what is inside
    a router, where small differences decide which experts a token meets.
    """
    parts = list(parts)
    read_by_kernels = {
        layer.get_submodule("out_proj")
        for part in parts
        for layer in part.modules()
        if hasattr(layer, "A_log") and hasattr(layer, "D") and hasattr(layer, "out_proj")
    }
    names = frozenset(name.rsplit(".", 1)[-1] for name in kept)
    linears: set[nn.Module] = {
        module
        for part in parts
        for name, module in part.named_modules()
        if (isinstance(module, nn.Linear) or expert_matrices(module))
        and names.isdisjoint(name.split("."))
    }
    routing = {module for part in parts for module in modules_of_routers(part)}
    found = linears - read_by_kernels - routing
    experts = [each for each in found if not isinstance(each, nn.Linear)]
    require_quantizable(len(found), kind, experts=bool(experts))
    require_known_experts(parts)
    return found


def swap(
    model: nn.Module, chosen: set[nn.Module], kind: Quantization, compute_dtype: torch.dtype
) -> None:
    """Puts an empty quantized layer in the place of each one that was chosen."""
    make = {"nf4": NF4Linear, "int8": Int8Linear, "fp8": FP8Linear}[kind]
    for experts in (each for each in chosen if not isinstance(each, nn.Linear)):
        hold = {"nf4": hold_in_nf4, "fp8": hold_in_fp8}[kind]
        hold(experts, compute_dtype)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in chosen and isinstance(child, nn.Linear):
                setattr(parent, name, make(child, compute_dtype))


def dequantize(model: nn.Module) -> nn.Module:
    """Puts an ordinary linear layer with the dequantized weights in the place of each quantized
    one."""
    for parent in list(model.modules()):
        if isinstance(parent, QuantizedExperts):
            parent.unpack()
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedLinear):
                plain = nn.Linear(child.in_features, child.out_features, False, device="meta")
                plain.weight = nn.Parameter(child.dequantize(), requires_grad=False)
                plain.bias = child.bias
                setattr(parent, name, plain)
    return model
