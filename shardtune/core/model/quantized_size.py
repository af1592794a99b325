"""Bytes of frozen weights in 16 bits, NF4, int8 or FP8, and what their calibration takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

from shardtune.core.model.fp8_memory import (
    HESSIAN_BUDGET,
    gptq_workspace_bytes,
    hessian_bytes,
    outlier_columns,
)
from shardtune.core.model.shape import LAYER_PARTS, ModelShape
from shardtune.core.model.weight import Weight
from shardtune.errors import ModelError, Problem

NF4_BLOCK = 64
"""Weights that share a scale."""
NF4_BITS = 4 + 8 / NF4_BLOCK + 32 / (NF4_BLOCK * 256)
"""Bits a weight: four, an 8-bit scale for 64 of them, an fp32 scale for 256 of those scales."""


def quantizable(shape: ModelShape, kept: Collection[str] = ()) -> int:
    """Numbers in the linear modules and experts that can be stored in 4 or 8 bits, biases not
    counted."""
    return sum(weight.total for weight in _packed(shape, kept))


def restored(shape: ModelShape, *, in_fp8: bool = False) -> int:
    """Numbers that are restored for each product: in FP8 those of experts alone."""
    return sum(weight.total for weight in _restored(shape, in_fp8=in_fp8))


def largest_restored(shape: ModelShape, expert_ranks: int = 1, *, in_fp8: bool = False) -> int:
    """Of these, the numbers of the largest weight, which is whole for a moment. Of experts a rank
    has its own."""
    found = _restored(shape, in_fp8=in_fp8)
    return max((each.size // (expert_ranks if each.routed else 1) for each in found), default=0)


def _restored(shape: ModelShape, *, in_fp8: bool) -> list[Weight]:
    return [weight for weight in _packed(shape, ()) if weight.routed or not in_fp8]


def require_quantizable(linears: int, kind: str = "nf4", *, experts: bool = False) -> None:
    """Refuses to quantize a model without ordinary linear layers; the planner counts their numbers,
    the trainer the layers. Experts, most of a model that has them, aren't stored in int8."""
    if not linears:
        fact = "the model's layers have no ordinary linear layers that could be quantized"
        raise ModelError(Problem("model.quantization", fact, "set model.quantization: none"))
    if experts and kind == "int8":
        fact = "is int8, which would leave the experts, most of the model, in 16 bits"
        fix = "set model.quantization: nf4 or fp8, which store experts too, or none"
        raise ModelError(Problem("model.quantization", fact, fix))


def require_whole_blocks(widths: Sequence[int]) -> None:
    """Refuses experts in NF4 that ranks are to divide where a block would lie in two of them.
    `widths` are those of an expert's smallest matrix: the others are multiples of it."""
    size = math.prod(widths)
    if size % NF4_BLOCK:
        fact = f"nf4 packs {NF4_BLOCK} weights together, and {size} of an expert don't divide"
        fix = "set model.quantization: none, or use a strategy that doesn't divide experts"
        raise ModelError(Problem("model.quantization", fact, fix))


def fp8_bytes(shape: ModelShape) -> int:
    """Bytes of linear modules and experts in 8-bit floating point. Of a linear module each number
    is there for either direction, and some columns twice; of experts each is there once."""
    linears = (weight for weight in _packed(shape, ()) if not weight.routed)
    return fp8_expert_bytes(shape) + sum(
        weight.total
        // weight.shape[-1]
        * (2 * weight.shape[-1] + outlier_columns(weight.shape[-1]))
        for weight in linears
    )


def fp8_expert_bytes(shape: ModelShape) -> int:
    """Of these, experts' bytes: a number's own, and a scale in bf16 for each output."""
    routed = (weight for weight in _packed(shape, ()) if weight.routed)
    return sum(weight.total // weight.shape[-1] * (weight.shape[-1] + 2) for weight in routed)


def gptq_bytes(shape: ModelShape) -> int:
    """At most so many bytes are taken for a while, beside `eight_bit`, to round them by data.
    Modules with one input may hear it together, which takes less."""
    packed = [weight for weight in _packed(shape, ()) if not weight.routed]
    squares = {
        part: sum(hessian_bytes(each.shape[-1]) for each in packed if each.part == part)
        for part in LAYER_PARTS
    }
    whole = sum(hessian_bytes(each.shape[-1]) * each.times for each in packed)
    heard = min(whole, max(HESSIAN_BUDGET, *squares.values()))
    return heard + max(
        (gptq_workspace_bytes(each.shape[-1], each.size) for each in packed), default=0
    )


def _packed(shape: ModelShape, kept: Collection[str]) -> list[Weight]:
    """Linear modules and experts in layers, without those in modules called as one of `kept`;
    GPT-2's transposed ones can't be stored so, nor routers."""
    names = {name.rpartition(".")[2] for name in kept}
    return [
        weight
        for weight in shape.weights
        if (weight.kind == "linear" or (weight.routed and weight.kind == "matrix"))
        and weight.part in LAYER_PARTS
        and names.isdisjoint(weight.module.split("."))
    ]


def frozen_bytes(
    shape: ModelShape,
    quantization: Literal["none", "nf4", "int8"] = "none",
    *,
    width: int = 2,
    kept: Collection[str] = (),
) -> int:
    """Bytes of all weights, those that are not quantized in `width` bytes each."""
    if quantization == "none":
        return shape.parameters * width
    packed = _packed(shape, kept)
    count = sum(weight.total for weight in packed)
    rest = (shape.parameters - count) * width
    if quantization == "nf4":
        return rest + math.ceil(count * NF4_BITS / 8)
    scales = sum(weight.times * weight.shape[0] for weight in packed)  # one for each output
    return rest + count + scales * width
