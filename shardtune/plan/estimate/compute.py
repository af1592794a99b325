"""Seconds that one layer, and the loss, keep a GPU busy: products, attention, small operations."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from shardtune.core.activation_memory import loss_chunk_rows
from shardtune.core.fused_families import RESIDUAL_FAMILIES, ROPE_FAMILIES
from shardtune.core.model.flops import attention_flops
from shardtune.core.model.quantized_size import quantizable
from shardtune.core.model.shape import ModelShape, Weight
from shardtune.plan.cluster import Cluster
from shardtune.plan.estimate.constants import Chip, TimeConstants
from shardtune.plan.estimate.expert_load import imbalance
from shardtune.plan.estimate.layer_tensors import mlp_width, norm_count, stream_readers
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.saved_tensors import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUTS,
    MLP_INPUTS,
    MLP_OUTPUTS,
    ExpertsWay,
    experts_way,
    is_last,
    is_repeated,
    met,
    products,
    readers,
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


GROUPED = 0.9
"""Of a large product's rate, what grouped products of experts reach: 650 TFLOP/s on an H200, with
1,024 to 2,048 rows of an expert. Their bytes pass meanwhile."""
ROW_PASSES: dict[ExpertsWay, tuple[float, float]] = {
    "fused": (2, 4), "grouped": (6, 7.6), "transformers": (6, 7.6),
}  # fmt: skip
"""Passes over the rows of experts' inputs, forward and backward: gathers, and sums of a token's
rows. Sums that are left to a compiler reach a third of the memory's rate; measured on an H200 with
Qwen3-30B-A3B."""
GATE_PASSES = 7.6
"""What a compiler's backward pass of a gate takes beyond ours, in passes over its inputs."""
SOFTMAX_PASSES = 13
"""Bytes that pass for a score that is written down, forward; half as many more backward."""
SOFTMAX_BATCH = 4
SOFTMAX_LAUNCHES = 4
"""What a softmax in steps launches beside the one kernel: a cast, a product, a mask, a cast."""
COPY = 0.89
"""Of the data sheet's bandwidth, what a copy reaches: 4.26 of 4.8 TB/s on an H200."""


@dataclass(frozen=True)
class Busy:
    """Forward and backward seconds of one micro-batch."""

    forward: float
    backward: float

    def __add__(self, other: Busy) -> Busy:
        return Busy(self.forward + other.forward, self.backward + other.backward)

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class GpuRates:
    """What the GPU can do, as a training step sees it."""

    cluster: Cluster
    chip: Chip
    time: TimeConstants
    width: float = 2
    """Bytes of a number that is computed with."""

    @cached_property
    def peak(self) -> float:
        """FLOP/s by the data sheet. In fp32 what a GPU reaches of it is taken to be what it reaches
        in 16 bits: none of the published runs multiplies in fp32."""
        gpu = self.cluster.gpu
        in_fp32 = gpu.fp32_tflops if self.width == 4 else None
        return (in_fp32 or gpu.peak_tflops) * 1e12

    @cached_property
    def flops(self) -> float:
        """FLOP/s of a large product."""
        points = self.cluster.measured.matmul
        found = [point.tflops for point in points if point.dtype != "fp8"]
        if self.width == 4 and self.cluster.gpu.fp32_tflops is not None:
            found = [point.tflops for point in points if point.dtype == "fp32"]
        ceiling = max(found) * 1e12 if found else self.peak * self.chip.ceiling
        return ceiling * self.chip.matmul

    @cached_property
    def bytes(self) -> float:
        """Bytes a second that small operations pass over."""
        copied = self.cluster.measured.memory_gbs
        sheet = copied / COPY if copied else self.cluster.gpu.memory_gbs
        return sheet * 1e9 * self.chip.memory

    def product(
        self, m: float, n: float, k: float, *, faster: float = 1.0, operand: float | None = None
    ) -> float:
        """An m x k matrix times a k x n one: the arithmetic, then the way of its bytes. `faster` is
        against 16 bits, `operand` how many bytes a number has that goes in, if not as all.

        They overlap, but tiles have edges, and kernels a start and an end: over all shapes the sum
        is nearer to what is measured than the longer of the two.
        """
        speed = self.flops * faster
        if n % 8 or k % 8:
            speed *= self.time.unaligned
        read = (operand or self.width) * (n * k + m * k)
        return 2 * m * n * k / speed + (self.width * m * n + read) / self.bytes

    def grouped(self, m: float, n: float, k: float) -> float:
        """The same of one expert among many, whose products are one kernel."""
        passed = self.width * (m * n + n * k + m * k) / self.bytes
        return max(2 * m * n * k / (self.flops * GROUPED), passed)


IDLE = Busy(0.0, 0.0)


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
    total += _small(shape, work, cut, tokens, on)
    if work.counted and work.kernels == "compiled":
        total += _expert_rows(shape, work, cut, tokens, on)
    if work.adapter is not None:
        total += _adapters(shape, work, cut, tokens, on)
    if work.autocast:
        elsewhere = work.trained_in_experts(shape) * (1 - 1 / cut.expert)
        cast = work.trained(shape) - elsewhere - _ends(shape, work)
        total += _casts(cast, on, layers * cut.tensor)
    if work.packed_bits is not None:
        elsewhere = shape.count(lambda weight: weight.routed) * (1 - 1 / cut.expert)
        packed = quantizable(shape) - elsewhere
        unpack = packed / layers / cut.tensor * _unpacking(work, on)
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
    compiled = work.kernels == "compiled"
    if work.adapter is not None:
        names = {w.name for w in again} if compiled else None
        total += _adapters(shape, work, cut, tokens, on, names).forward
    if not compiled:
        total += _small(shape, work, cut, tokens, on).forward
    if work.packed_bits is not None:
        total += sum(w.total for w in again) / layers / cut.tensor * _unpacking(work, on)
    return total


def _unpacking(work: Workload, on: GpuRates) -> float:
    """Seconds for a quantized weight to become a 16-bit one."""
    assert work.packed_bits is not None
    return (work.packed_bits / 8 + 2) / on.bytes


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
        small += _casts(head, on, 1).both
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


def _casts(weights: float, on: GpuRates, shares: float) -> Busy:
    """Weights from fp32 to 16 bits before a product, and their gradients back after it."""
    scale = weights / shares / on.bytes
    return Busy((4 + 2) * scale, (2 + 4) * scale)


def _linear(
    weight: Weight, shape: ModelShape, work: Workload, cut: RankShare, tokens: float, on: GpuRates
) -> Busy:
    *many, outputs, inputs = weight.shape
    copies: float = math.prod(many)
    rows = tokens * met(weight, shape)
    if weight.routed:  # a rank has fewer experts, and tokens of all ranks for them
        copies /= cut.expert
        rows *= cut.expert * imbalance(shape, cut.expert)
    by_row = work.by_row
    faster = on.chip.fp8_rows if by_row else on.chip.fp8 if work.fp8 else 1.0
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


def _small(shape: ModelShape, work: Workload, cut: RankShare, tokens: float, on: GpuRates) -> Busy:
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


def _expert_rows(
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
    """Queries and keys are turned where their product ends."""
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


def _adapters(
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
        # What goes back to the first adapters is added up in parts, of 64 columns each.
        parts = 2 * work.adapter.rank / 64
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
