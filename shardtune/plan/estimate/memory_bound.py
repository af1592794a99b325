"""Seconds of what reads and writes much and computes little: small operations between the products,
rows of experts, adapters, casts. The memory's rate is the limit."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from shardtune.core.model.fused_families import RESIDUAL_FAMILIES, ROPE_FAMILIES
from shardtune.core.model.shape import ModelShape, Weight
from shardtune.core.setup import LARGEST_SUMMED_RANK
from shardtune.plan.estimate.expert_load import imbalance
from shardtune.plan.estimate.gpu_rates import Busy, GpuRates
from shardtune.plan.estimate.layer_tensors import mlp_width, norm_count, stream_readers
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.saved_tensors import (
    ATTENTION_INPUTS,
    MLP_INPUTS,
    ExpertsWay,
    experts_way,
    is_last,
    met,
    products,
    readers,
)
from shardtune.plan.estimate.workload import Workload

ROW_PASSES: dict[ExpertsWay, tuple[float, float]] = {
    "fused": (2, 4), "grouped": (6, 7.6), "transformers": (6, 7.6),
}  # fmt: skip
"""Passes over the rows of experts' inputs, forward and backward: gathers, and sums of a token's
rows. Sums that are left to a compiler reach a third of the memory's rate; measured on an H200 with
Qwen3-30B-A3B."""
GATE_PASSES = 7.6
"""What a compiler's backward pass of a gate takes beyond ours, in passes over its inputs."""


def small_seconds(
    shape: ModelShape, work: Workload, cut: RankShare, tokens: float, on: GpuRates
) -> Busy:
    """Norms, residuals, rotations, activation functions: by the bytes that they pass over."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.value_dim
    spread = cut.tensor if work.sequence_parallel else 1
    wide = mlp_width(shape)
    if shape.experts is not None:
        more = imbalance(shape, cut.expert) - 1
        wide += more * shape.experts.per_token * shape.experts.ffn
    eager = work.kernels == "eager"
    by_hand = eager and shape.norm == "rms"
    norms = norm_count(shape)
    hidden = Busy(norms * (16 if by_hand else 2) + 6, norms * (30 if by_hand else 4) + 6)
    if work.wide_stream:
        # All of it in fp32; and on its own, every linear casts its input.
        casts = 3 * len(stream_readers(shape))
        hidden = hidden + (Busy(6 + casts, 6 + casts) if eager else hidden)
    if work.dropout:
        hidden += Busy(5, 5)
    rotary = (12.0, 14.0) if eager else (2.0, 2.0)
    rotated = Busy(*rotary) if shape.positions == "rotary" else Busy(1, 1)
    mlp = (Busy(5, 9) if eager else Busy(3, 5)) if shape.gated else Busy(2, 3)
    if work.counted and work.kernels == "compiled":
        # None of their results was kept: norms, rotations and the activation are made again.
        joined = _joined(shape, work)
        if joined.ends:
            # What went past is read where small products are added to it; back, a norm reads its
            # input and both gradients once, and gives one of them and what it had given.
            hidden = Busy(2 * norms + 2, 5 * norms)
        else:
            hidden += Busy(0, 2 * norms)
        rotated += Busy(0, 0 if joined.attention else 2)
        mlp += Busy(0, 0 if joined.ends else 1)
    times = {
        "eager": on.time.eager_passes,
        "fused": on.time.fused_passes,
        "compiled": on.time.compiled_passes,
    }[work.kernels]
    scale = times * tokens * work.widths.compute / on.bytes

    def total(hidden: float, rotated: float, mlp: float) -> float:
        inside = rotated * (q + kv) + mlp * wide
        return scale * (hidden * shape.hidden / spread + inside / cut.tensor)

    return Busy(
        total(hidden.forward, rotated.forward, mlp.forward),
        total(hidden.backward, rotated.backward, mlp.backward),
    )


def expert_row_seconds(
    shape: ModelShape, work: Workload, cut: RankShare, tokens: float, on: GpuRates
) -> Busy:
    """Tokens that become rows of experts, and rows that become tokens."""
    way = experts_way(shape, work)
    if way is None or shape.experts is None:
        return Busy(0.0, 0.0)
    mixed = shape.experts.layers / shape.layers
    scale = mixed * shape.experts.per_token * tokens * work.widths.compute / on.bytes / cut.tensor
    forward, backward = (passes * shape.hidden for passes in ROW_PASSES[way])
    if way != "fused":
        backward += GATE_PASSES * (1 + shape.gated) * shape.experts.ffn
    return Busy(forward * scale, backward * scale)


@dataclass(frozen=True)
class Joined:
    """What fused layers compute together, by which have adapters: `models/fused/lora.py`."""

    attention: bool = False
    """RoPE is applied to queries and keys where their product ends."""
    ends: bool = False
    """An MLP computes its activation with its adapters, and products add to what went past."""


def _joined(shape: ModelShape, work: Workload) -> Joined:
    if work.adapter is None or work.drops_apart or shape.experts is not None:
        return Joined()
    adapted, own = frozenset(work.adapts(shape)), stream_readers(shape)
    attention, mlp = own & ATTENTION_INPUTS, own & MLP_INPUTS
    return Joined(
        attention=shape.family in ROPE_FAMILIES and attention <= adapted,
        ends=shape.family in RESIDUAL_FAMILIES and (mlp | {"down_proj"}) <= adapted,
    )


def adapter_seconds(
    shape: ModelShape,
    work: Workload,
    cut: RankShare,
    tokens: float,
    on: GpuRates,
    only: Collection[str] | None = None,
) -> Busy:
    """Narrow products that read and write whole activations; rank hardly matters. `only` names the
    weights whose adapters count."""
    assert work.adapter is not None
    if work.counted and work.kernels == "compiled":
        return _own_adapters(shape, work, cut, tokens, on, only)
    layers = shape.layers + shape.encoder_layers
    forward = backward = 0.0
    dropped = 4 if work.adapter.dropout else 0
    # On their own, scaling, adding and casting to fp32 and back each pass over everything.
    alone = work.kernels != "compiled"
    cast = 2 if work.widths.trained > 2 and alone else 1
    for weight in work.adapter.on(shape):
        *many, outputs, inputs = weight.shape
        share = weight.times / layers * math.prod(many) * met(weight, shape)
        share *= imbalance(shape, cut.expert) if weight.routed else 1.0
        forward += share * ((1 + dropped) * inputs + (5 if alone else 3) * outputs)
        backward += share * (((4 if alone else 3) + dropped) * inputs + 3 * outputs)
    scale = cast * tokens * work.widths.compute / on.bytes / cut.tensor
    return Busy(forward * scale, backward * scale)


def _own_adapters(
    shape: ModelShape,
    work: Workload,
    cut: RankShare,
    tokens: float,
    on: GpuRates,
    only: Collection[str] | None,
) -> Busy:
    """The same by `models/fused/lora_autograd.py`: adapters with one input read it once, and what
    they give is added where the large product is written. A gated MLP adds it while it computes the
    activation, which it also hands to the last adapter; its backward pass sums up gradients of
    their matrices there, too. Where weights aren't in 8 bits, what adapters with one input give
    comes out of the large product, and what goes back through them goes into it."""
    assert work.adapter is not None
    joined = _joined(shape, work)
    targets = {weight.name for weight in work.adapter.on(shape)}
    forward = backward = 0.0
    for weight, times in products(shape):
        if weight.name not in targets or (only is not None and weight.name not in only):
            continue
        outputs, inputs = weight.features
        if weight.routed:
            ahead, back = _of_experts(weight, shape, work)
            forward, backward = forward + times * ahead, backward + times * back
            continue
        joint = inputs / readers(weight, shape)
        opens = shape.gated and weight.module.rpartition(".")[2] in MLP_INPUTS
        reads_first = weight.module.rpartition(".")[2] in ATTENTION_INPUTS
        closes = shape.gated and is_last(weight)
        along = not work.fp8 and (joined.ends if opens else joined.attention and reads_first)
        along = along and not work.adapter.dropout
        reads = 0 if closes or (along and opens) else joint
        forward += times * (reads + (0 if opens else 2 * outputs))
        # What goes back to the first adapters is added up in parts of 64 columns, or by GEMMs.
        rank = work.adapter.rank
        parts = 2 * rank / 64 if rank <= LARGEST_SUMMED_RANK else 2
        backs = 0 if closes else 1 if along else 3
        backward += times * (backs * joint + (parts if opens else 2) * outputs)
        if work.adapter.dropout:  # masks are computed where x is read, and once more for each use
            forward += times * on.time.masks * inputs
            backward += times * 2 * on.time.masks * inputs
    scale = on.time.narrow * tokens * work.widths.compute / on.bytes / cut.tensor
    return Busy(forward * scale, backward * scale)


def _of_experts(weight: Weight, shape: ModelShape, work: Workload) -> tuple[float, float]:
    """Numbers that pass for a row of an expert's adapter, forward and backward. Fused, the second
    factor costs nothing forward, nor the first one backward; what is left reads inputs and
    gradients for the small numbers between the factors, and for the gradients of both."""
    outputs, inputs = weight.features
    if experts_way(shape, work) != "fused":
        return inputs + 2 * outputs, 3 * inputs + 2 * outputs
    return inputs, inputs + (2 if is_last(weight) else 1) * outputs


def cast_seconds(weights: float, on: GpuRates, shares: float) -> Busy:
    """Weights from fp32 to 16 bits before a product, and their gradients back after it."""
    scale = weights / shares / on.bytes
    return Busy((4 + 2) * scale, (2 + 4) * scale)


def unpack_seconds(work: Workload, on: GpuRates) -> float:
    """Seconds for a quantized weight to become a 16-bit one; experts in FP8 have a byte each."""
    return ((work.packed_bits or 8) / 8 + 2) / on.bytes
