"""Weights and gradients that are whole for a moment: gathered, unpacked, cast, or being sent."""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.core.layout import Layout, State
from shardtune.core.mesh import Mesh
from shardtune.core.model.quantized_size import largest_restored, quantizable
from shardtune.core.model.shape import ModelShape
from shardtune.plan.estimate.rank_share import (
    WEIGHTS,
    RankShare,
    end_parameters,
    held_share,
    largest_part,
)
from shardtune.plan.estimate.workload import Workload, sent_bytes

PACKED_BITS = 4
"""Quantized weights have so many bits, or twice as many; what is more is for their scales."""


@dataclass(frozen=True)
class Casts:
    """16-bit copies of fp32 weights: at the loss, as the backward pass begins, and of a layer."""

    forward: float
    backward: float
    layer: float


def casts_of(shape: ModelShape, work: Workload, cut: RankShare) -> Casts:
    if not work.autocast:
        return Casts(0.0, 0.0, 0.0)
    width = work.widths.compute / cut.tensor
    share = cut.layer_share(shape)
    here = work.trained(shape) - work.trained_in_experts(shape) * (1 - 1 / cut.expert)
    if work.adapter is not None:
        every, head = here * width * share, 0.0
    else:
        every = (here - shape.embedding_parameters) * width * share
        in_loss = work.loss != "pieces" and cut.ends
        head = shape.vocab * shape.hidden * width if in_loss else 0.0
    one = every / cut.layers(shape)
    if work.checkpointing == "none" and not work.keeps_products:
        return Casts(every + head, every, one)
    # Autocast remembers its casts until the forward pass is over, which our loss in pieces belongs
    # to; a plain loss is largest after it. What is compiled has casts of its own.
    remembered = every if work.loss == "pieces" and work.kernels == "eager" else 0.0
    return Casts(remembered + head, one, one)


def in_shares(layout: Layout, work: Workload) -> bool:
    """Our own engine for weights in shares (FSDP2), be it on one rank."""
    divided = any(rule.by == "share" and "params" in rule.divides for rule in layout.rules)
    return work.counted and work.buckets is None and divided


def gathered_bytes(
    layout: Layout, shape: ModelShape, mesh: Mesh, work: Workload, cut: RankShare
) -> tuple[float, float]:
    """Weights that are whole for the moment, at the loss and while a layer is at work: gathered
    from others, or unpacked."""
    unpacked = 0.0
    if work.restores_weights:
        largest = largest_restored(shape, cut.expert, in_fp8=work.by_row)
        unpacked = largest * work.widths.compute / cut.tensor
    here = layout.divisor("params", mesh) == 1 and layout.home.get("params", "gpu") == "gpu"
    if here and not in_shares(layout, work):
        return unpacked, unpacked
    width = work.widths.gathered
    layer = largest_part(shape, cut) * width
    if work.packed_bits is not None:
        layer *= work.packed_bits / 8 / width
    ends = end_parameters(shape, cut) * width / cut.tensor
    gathers = [sum(move.what in WEIGHTS for move in rule.moves) for rule in layout.rules]
    if max(gathers) == 1 and "params" not in _copied(layout):
        elsewhere = sent_bytes(shape, work).experts.params * (1 - 1 / cut.expert)
        whole = _all_weights(shape, work) * held_share(shape, cut) - elsewhere + unpacked
        return whole, whole
    if work.buckets is not None:
        each = width if work.packed_bits is None else 1  # packed weights are elements of a byte
        every = _all_weights(shape, work) / cut.tensor
        live = min(work.buckets.live * each, every)
        ahead = min(work.buckets.prefetch * each, every)
        whole = max(live, layer + max(ahead, ends)) + unpacked
        return whole, whole
    several = layer * (2 if work.prefetch else 1) + unpacked
    if work.counted:
        # A plain loss is largest when all has been let go; one in pieces works in the last module.
        return (ends + layer if work.loss == "pieces" else 0.0), ends + several
    if work.ends_apart and not shape.tied:
        return ends / 2 + layer, several
    return ends + several, ends + several


def _all_weights(shape: ModelShape, work: Workload) -> float:
    """Bytes of all weights as they are gathered: packed ones stay so."""
    if work.packed_bits is None:
        return shape.parameters * work.widths.gathered
    return sent_bytes(shape, work).params


def sending_bytes(
    layout: Layout, shape: ModelShape, mesh: Mesh, work: Workload, cut: RankShare
) -> float:
    """Gradients that are whole for the moment, and the buffers that they are sent in."""
    if mesh.size == 1 and work.buckets is None:
        return 0.0
    if work.buckets is not None:
        return work.buckets.buffers * work.buckets.reduce * work.widths.compute
    if layout.divisor("grads", mesh) == 1:
        return 0.0
    # A layer's, or at last those of the embedding and the head.
    ends = end_parameters(shape, cut) // (2 if work.ends_apart and not shape.tied else 1)
    largest = max(largest_part(shape, cut), ends / cut.tensor)
    if work.adapter is not None:
        largest = work.trained(shape) / (shape.layers + shape.encoder_layers) / cut.tensor
    return largest * (work.widths.compute + work.widths.reduced)


def updating_bytes(
    layout: Layout, shape: ModelShape, mesh: Mesh, optim: float, work: Workload
) -> float:
    """What the update needs beside the states: a temporary, a bucket to collect weights in."""
    temporary = optim / 2 if work.foreach else 0.0  # one of two moments
    if work.buckets is not None and layout.home.get("optim", "gpu") == "gpu":
        # The gradients of a rank's share in fp32, some at a time.
        own = work.trained(shape) / layout.divisor("optim", mesh)
        temporary += 4 * min(work.buckets.updated, own) if work.widths.gradients < 4 else 0.0
    whole = layout.divisor("params", mesh) == 1 and layout.divisor("optim", mesh) > 1
    if work.buckets is None or not whole:
        return temporary
    return temporary + min(work.buckets.gather, work.trained(shape)) * work.widths.gathered


def persistent_bytes(layout: Layout, shape: ModelShape, mesh: Mesh, work: Workload) -> float:
    """What small weights take where each rank keeps them whole, beside its share of them. The only
    rank of all keeps them in the memory of its share."""
    shares = layout.divisor("params", mesh)
    if work.buckets is None or not work.buckets.persistent or shares == 1:
        return 0.0
    sizes = [(weight.size, weight.times) for weight in shape.weights if weight.parameter]
    if work.adapter is not None:
        sizes += [
            (work.adapter.rank * features, weight.times)
            for weight in work.adapter.on(shape)
            for features in weight.features
        ]
    small = sum(size * times for size, times in sizes if work.buckets.stays_whole(size))
    return min(small, work.buckets.most_persistent) * work.widths.gathered


def scale_bytes(layout: Layout, shape: ModelShape, mesh: Mesh, work: Workload) -> float:
    """What the scales of quantized weights take beyond a rank's share of them, where every rank has
    all of them on its GPU, wherever the weights are."""
    if work.packed_bits is None or work.divides_scales:
        return 0.0
    scales = quantizable(shape) * (work.packed_bits % PACKED_BITS) / 8
    if layout.home.get("params", "gpu") != "gpu":
        return scales
    return scales * (1 - 1 / layout.divisor("params", mesh))


def _copied(layout: Layout) -> frozenset[State]:
    return frozenset(state for rule in layout.rules for state in rule.copies)
