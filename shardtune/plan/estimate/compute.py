"""Seconds that one layer, and the loss, keep a GPU busy: their products, and all that runs beside.

What computes little is in `memory_bound.py`, what the GPU reaches in `gpu_rates.py`.
"""

from __future__ import annotations

import math

from shardtune.core.model.activation_memory import loss_chunk_rows
from shardtune.core.model.flops import attention_flops
from shardtune.core.model.quantized_size import restored
from shardtune.core.model.shape import ModelShape, Weight
from shardtune.plan.estimate.expert_load import imbalance
from shardtune.plan.estimate.gpu_rates import IDLE, Busy, GpuRates
from shardtune.plan.estimate.memory_bound import (
    adapter_seconds,
    cast_seconds,
    expert_row_seconds,
    small_seconds,
    unpack_seconds,
)
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.saved_tensors import (
    ATTENTION_OUTPUTS,
    MLP_OUTPUTS,
    is_repeated,
    met,
    products,
    readers,
    saves_scores,
)
from shardtune.plan.estimate.workload import LossKind, Workload

LOSS_PASSES: dict[LossKind, int] = {
    "plain": 28, "shifted": 40, "compiled": 14, "chunked": 20, "widened": 28,
    "fused": 16, "pieces": 6,
}  # fmt: skip
"""Bytes that pass for a logit, forward and backward, beside the head's own products."""
SLICED_LOSS_PASSES = 52
"""The same where the vocabulary is divided: maximum, difference, exponential, sum and quotient are
steps of their own, as each is known only when all slices are. Counted for Megatron's."""
LOSS_LAUNCHES = 30
"""Operations of embedding, last norm, head and loss in a forward pass."""
SOFTMAX_PASSES = 13
"""Bytes that pass for a score that is written down, forward; half as many more backward."""
SOFTMAX_BATCH = 4
SOFTMAX_LAUNCHES = 4
"""What a softmax in steps launches beside the one kernel: a cast, a product, a mask, a cast."""


def layer_seconds(
    shape: ModelShape, work: Workload, cut: RankShare, on: GpuRates, exchanged: Busy = IDLE
) -> Busy:
    """One layer, averaged over a model whose layers differ. `exchanged` is what its slices send to
    each other: the GPU waits for it, while the host launches what comes next."""
    tokens = work.tokens / cut.context
    layers = shape.layers + shape.encoder_layers
    total = Busy(0.0, 0.0)
    for weight, _ in products(shape):
        each = _linear(weight, shape, work, cut, work.tokens_of(weight) / cut.context, on)
        share = weight.times / layers
        total += Busy(each.forward * share, each.backward * share)
    total += _attention(shape, work, cut, on)
    total += small_seconds(shape, work, cut, tokens, on)
    if work.counted and work.kernels == "compiled":
        total += expert_row_seconds(shape, work, cut, tokens, on)
    if work.adapter is not None:
        total += adapter_seconds(shape, work, cut, tokens, on)
    if work.autocast:
        elsewhere = work.trained_in_experts(shape) * (1 - 1 / cut.expert)
        cast = work.trained(shape) - elsewhere - _ends(shape, work)
        total += cast_seconds(cast, on, layers * cut.tensor)
    if work.restores_weights:
        elsewhere = shape.count(lambda weight: weight.routed) * (1 - 1 / cut.expert)
        here = restored(shape, in_fp8=work.by_row) - elsewhere
        unpack = here / layers / cut.tensor * unpack_seconds(work, on)
        total += Busy(unpack, unpack)
    return _launched(total + exchanged, shape, work, cut, on)


def repeated_seconds(shape: ModelShape, work: Workload, cut: RankShare, on: GpuRates) -> float:
    """What the backward pass of a layer computes once more at the levels `mlp` and `most`, beyond
    the small operations that compiled layers repeat at every level.

    On their own, small operations and adapters are all run again; what the adapters' wide results
    save by being kept is left out of the account.
    """
    tokens = work.tokens / cut.context
    layers = shape.layers + shape.encoder_layers
    again = [w for w, _ in products(shape) if is_repeated(w, work.checkpointing)]
    total = sum(
        _linear(weight, shape, work, cut, tokens, on).forward * weight.times / layers
        for weight in again
    )
    if work.attention == "eager" and not saves_scores(shape, work, work.checkpointing):
        total += _attention(shape, work, cut, on).forward
    compiled = work.kernels == "compiled"
    if work.adapter is not None:
        names = {w.name for w in again} if compiled else None
        total += adapter_seconds(shape, work, cut, tokens, on, names).forward
    if not compiled:
        total += small_seconds(shape, work, cut, tokens, on).forward
    if work.restores_weights:
        packed = sum(weight.total for weight in again if weight.routed or not work.by_row)
        total += packed / layers / cut.tensor * unpack_seconds(work, on)
    return total


def loss_seconds(shape: ModelShape, work: Workload, cut: RankShare, on: GpuRates) -> Busy:
    """Output head and loss."""
    tokens = work.tokens / cut.context * work.scored
    vocab = shape.vocab / cut.tensor
    product = on.product(tokens, vocab, shape.hidden)
    trained = work.adapter is None
    passes = LOSS_PASSES[work.loss]
    if cut.tensor > 1 and work.loss in ("plain", "shifted"):
        passes = SLICED_LOSS_PASSES
    small = tokens * vocab * passes / on.bytes
    head = vocab * shape.hidden
    if work.autocast and trained:
        small += cast_seconds(head, on, 1).both
    if work.loss == "pieces" and trained:
        # Each piece's share of the head's gradient is added to an fp32 sum.
        small += -(-tokens // loss_chunk_rows(shape.vocab)) * head * 8 / on.bytes
    host = 0.0 if work.captured else LOSS_LAUNCHES * on.time.launch
    return Busy(
        _slower(product + small / 2, host, cut, on),
        _slower(product * (1 + trained) + small / 2, 2 * host, cut, on),
    )


def _ends(shape: ModelShape, work: Workload) -> int:
    return shape.embedding_parameters if work.adapter is None else 0


def _linear(
    weight: Weight, shape: ModelShape, work: Workload, cut: RankShare, tokens: float, on: GpuRates
) -> Busy:
    *many, outputs, inputs = weight.shape
    copies: float = math.prod(many)
    rows = tokens * met(weight, shape)
    if weight.routed:  # a rank has fewer experts, and tokens of all ranks for them
        copies /= cut.expert
        rows *= cut.expert * imbalance(shape, cut.expert)
    by_row = work.by_row and not weight.routed
    faster = on.chip.fp8_rows if by_row else on.chip.fp8 if work.fp8 and not work.by_row else 1.0
    if work.fp8_by_row:
        faster = on.time.fp8_trained_rows
    # Slices of a product share its outputs, but what ends attention or an MLP shares its inputs.
    ends = weight.module.rpartition(".")[2] in ATTENTION_OUTPUTS | MLP_OUTPUTS
    sliced = (outputs, inputs / cut.tensor) if ends else (outputs / cut.tensor, inputs)
    forward = copies * on.product(rows, *sliced, faster=faster, operand=1 if by_row else None)
    if weight.routed and work.counted and work.kernels == "compiled":
        forward = copies * on.grouped(rows, *sliced)
    trained = work.adapter is None
    busy = Busy(forward, forward * (1 + trained))
    if by_row:
        # What goes in is read in 16 bits and written in 8: once for all that read it, and in the
        # backward pass the gradient of what came out.
        scale = copies * rows * 3 / on.bytes / cut.tensor
        busy += Busy(inputs * scale / readers(weight, shape), outputs * scale)
    return busy


def _attention(shape: ModelShape, work: Workload, cut: RankShare, on: GpuRates) -> Busy:
    layers = shape.layers + shape.encoder_layers
    pairs = attention_flops(shape, work.sequence, work.target) / layers * work.micro_batch
    pairs /= cut.tensor * cut.context
    if work.attention != "eager":
        share = on.chip.attention if work.attention == "flash" else on.chip.sdpa
        forward = pairs / (on.peak * share)
        return Busy(forward, 2.5 * forward / 0.75)  # five products instead of two, less well
    # Every pair is computed and written down: forward 2 products, backward 4.
    every = 2 * pairs / (on.flops * 0.5)
    scores = work.micro_batch * shape.heads * work.scores / cut.tensor
    passes = SOFTMAX_PASSES if _fuses_softmax(shape, work, cut) else 2 * SOFTMAX_PASSES
    return Busy(every + scores * passes / on.bytes, 2 * every + scores * 1.5 * passes / on.bytes)


def _fuses_softmax(shape: ModelShape, work: Workload, cut: RankShare) -> bool:
    """Whether scores are scaled, masked and normalised by one kernel: Megatron's takes matrices of
    scores by fours, and where a slice has another number of them each step runs on its own."""
    matrices = work.micro_batch * shape.heads // cut.tensor
    return work.kernels != "eager" and matrices % SOFTMAX_BATCH == 0


def _launched(busy: Busy, shape: ModelShape, work: Workload, cut: RankShare, on: GpuRates) -> Busy:
    """The slower of the GPU and of the host that feeds it."""
    forward = {"eager": 55, "fused": 45, "compiled": 25}[work.kernels]
    if work.adapter is not None:
        layers = shape.layers + shape.encoder_layers
        adapted = sum(w.times for w in work.adapter.on(shape)) / layers
        forward += round((2 if work.kernels == "compiled" else 6) * adapted)
    if work.packed_bits is not None:
        forward += 20
    if work.attention == "eager" and work.kernels != "eager":
        forward += 0 if _fuses_softmax(shape, work, cut) else SOFTMAX_LAUNCHES
    if cut.tensor > 1:
        forward += 2  # two collectives
    if work.captured:
        gap = forward * on.time.graph_gap
        return Busy(busy.forward + gap, busy.backward + 2 * gap)
    host, starts = forward * on.time.launch, forward * on.time.start
    return Busy(
        _slower(busy.forward + starts, host, cut, on),
        _slower(busy.backward + 2 * starts, 2 * host, cut, on),
    )


def _slower(gpu: float, host: float, cut: RankShare, on: GpuRates) -> float:
    """The slower of the two. Slices wait for the slowest of their hosts, and where ranks wait for
    each other, neither hides behind the other as far."""
    power = on.time.sharpness if cut.tensor == 1 else on.time.joint_sharpness
    slowest = host * (1 + on.time.straggling * (cut.tensor - 1))
    return float((gpu**power + slowest**power) ** (1 / power))
