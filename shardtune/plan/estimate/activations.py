"""What a forward pass leaves behind for the backward pass: closed forms, in bytes.

`layer_tensors.py` counts what one layer keeps of a token; here are layers, stages and the loss.
"""

from __future__ import annotations

from shardtune.core.model.activation_memory import loss_chunk_rows
from shardtune.core.model.shape import ModelShape
from shardtune.core.setup import LARGEST_SUMMED_RANK
from shardtune.plan.estimate.constants import MemoryConstants
from shardtune.plan.estimate.expert_load import imbalance
from shardtune.plan.estimate.family_copies import (
    LAYER_FP32,
    RMS_FP32,
    WITHOUT_WEIGHT,
    copies_of,
)
from shardtune.plan.estimate.layer_tensors import (
    adapter_bytes,
    adapts_last,
    attention_blocks,
    attention_numbers,
    expert_factor_bytes,
    mask_bytes,
    mlp_numbers,
    mlp_width,
    norm_count,
    norm_numbers,
    read_numbers,
    score_bytes,
    writes_scores,
)
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.saved_tensors import kept_bytes
from shardtune.plan.estimate.workload import Workload

ON_DEVICE = 2
"""Layers of which the saved tensors are on the GPU while others wait in CPU memory: one on its way
and one at work (`engine/activation_offload.py`)."""


def layer_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What one layer keeps of one micro-batch when nothing is recomputed, but for the small
    operations of layers that we compile."""
    if work.counted and work.kernels == "compiled":
        return kept_bytes(shape, work, cut, "none")
    tokens = work.tokens / cut.context
    width = work.widths.compute
    spread = cut.tensor if work.sequence_parallel else 1
    norms, readers = norm_numbers(shape, work), read_numbers(shape, work)
    # Our slices read what was gathered, all tokens of it, and keep that.
    total = norms / spread + readers / (1 if work.counted else spread)
    attentions = attention_numbers(shape, work) * attention_blocks(shape)
    busiest = imbalance(shape, cut.expert)  # the rank that gets most tokens keeps most
    total += (attentions + mlp_numbers(shape, work, busiest)) / cut.tensor
    total *= width * tokens
    if writes_scores(shape, work):
        scores = work.micro_batch * work.scores / cut.context
        total += scores * shape.heads / cut.tensor * score_bytes(shape, work)
    total += mask_bytes(shape, work) + expert_factor_bytes(shape, work) / cut.expert
    if work.dropout:
        total += 2 * shape.hidden * tokens / spread  # a byte for each of two masks
        total += mlp_width(shape) * tokens / cut.tensor if work.pair else 0.0  # and in the MLP
    if work.adapter is not None:
        total += adapter_bytes(shape, work) * tokens / cut.tensor
    return total


def again_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What is kept once more of what is recomputed at a time: a layer, or its MLP alone."""
    if not work.by_module:
        return layer_bytes(shape, work, cut)
    tokens = work.tokens / cut.context / cut.tensor
    return mlp_numbers(shape, work) * work.widths.compute * tokens


def boundary_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What flows from one layer to the next."""
    spread = cut.tensor if work.sequence_parallel else 1
    return shape.hidden * work.stream * work.tokens / cut.context / spread


def selective_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What a layer keeps when every second matrix product and the attention's result are kept."""
    tokens = work.tokens / cut.context
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.value_dim
    # Of the products q, k, v, o, gate, up, down every second is computed again.
    products = q + kv + mlp_width(shape) + shape.hidden
    inside = (q + products - shape.hidden) / cut.tensor
    outside = 2 * shape.hidden / (cut.tensor if work.sequence_parallel else 1)
    return (inside + outside) * work.widths.compute * tokens


def stack_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What all layers of a rank keep at the end of the forward pass, without the layer at work."""
    layers = cut.layers(shape)
    each, more = saved_bytes(shape, work, cut), _kept_layer(shape, work, cut)
    if work.offloaded:
        return max(each, more) * min(layers, ON_DEVICE)
    kept = min(work.kept_layers, layers) if more else 0
    stack = (each * (layers - kept) + more * kept) * in_flight(work, cut)
    return stack + _position_bias(shape, work)


def _position_bias(shape: ModelShape, work: Workload) -> float:
    """T5's relative positions and its mask: a number for each pair of tokens and head. The first
    layer of each half makes it, and all others add the same to their scores."""
    if work.pair is None or shape.positions != "relative":
        return 0.0
    read, written = work.sequence, work.pair.target
    pairs = read**2 + written**2 + read * written
    return work.micro_batch * shape.heads * pairs * work.stream


def waiting_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What waits in CPU memory for the backward pass: all layers but the last."""
    if not work.offloaded:
        return 0.0
    layers, more = shape.layers + shape.encoder_layers, _kept_layer(shape, work, cut)
    kept = min(work.kept_layers, layers) if more else 0
    each = saved_bytes(shape, work, cut)
    return each * (layers - kept) + more * kept - max(each, more)


def saved_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What a layer keeps for its backward pass."""
    if work.checkpointing == "full":
        # On its own, each norm keeps its input, and so does what reads its result.
        inputs = 2 * norm_count(shape) if work.by_module else 1
        return 0.0 if work.offloaded_checkpoints else inputs * boundary_bytes(shape, work, cut)
    if work.checkpointing == "selective":
        return selective_bytes(shape, work, cut)
    if work.checkpointing in ("mlp", "most"):
        return kept_bytes(shape, work, cut, work.checkpointing)
    return layer_bytes(shape, work, cut)


def _kept_layer(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What a layer keeps that is to keep more than the others; 0 where there is none."""
    if not work.kept_layers or work.checkpointing not in ("mlp", "most"):
        return 0.0
    return kept_bytes(shape, work, cut, "none")


def in_flight(work: Workload, cut: RankShare) -> float:
    """Micro-batches whose activations a rank holds at once."""
    if cut.pipeline == 1:
        return 1.0
    return work.pipelining.in_flight(cut.pipeline, work.microbatches, cut.place)


def logit_bytes(shape: ModelShape, work: Workload, cut: RankShare, k: MemoryConstants) -> float:
    """What the loss takes at its worst, where the head is."""
    if not cut.ends:
        return 0.0
    tokens = work.tokens / cut.context * work.scored
    if work.loss == "fused":
        return tokens * shape.hidden * k.fused_hidden
    if work.loss == "pieces":
        return _piece_bytes(shape, work, cut, tokens)
    if work.counted:
        # Log-probabilities, their gradient and that of the logits are there together, in fp32.
        # Slices need no log-probabilities; they keep the logits in 16 bits.
        each = 12 if cut.tensor == 1 else 8 + work.widths.compute
        return tokens * (each * shape.vocab / cut.tensor + top_bytes(shape, work))
    each = {
        "plain": (k.plain_logit if cut.tensor == 1 else k.sliced_logit) + 2 * work.returns_logits,
        "shifted": k.shifted_logit - (2 if work.fp32_stream else 0),  # no 16-bit logits
        "compiled": k.compiled_logit,
        "chunked": k.chunked_logit,
        "widened": k.widened_logit,
    }[work.loss]
    return tokens * shape.vocab / cut.tensor * each


def _piece_bytes(shape: ModelShape, work: Workload, cut: RankShare, tokens: float) -> float:
    """A piece's logits, which become their gradient, and the next piece's; the head in 16 bits."""
    rows = min(tokens, loss_chunk_rows(shape.vocab))
    piece = rows * shape.vocab * work.widths.compute / cut.tensor
    head = shape.vocab * shape.hidden * work.widths.compute / cut.tensor
    total = (2 if tokens > rows else 1) * piece
    if work.wide_stream:
        total += head  # cast from fp32
    # What the head reads is there twice, whole and without what has no label; and its gradient.
    return total + tokens * (top_bytes(shape, work) + 3 * shape.hidden * work.stream)


def top_bytes(shape: ModelShape, work: Workload) -> float:
    """Bytes a token that the last norm keeps, and the head of its input. It is never compiled."""
    copies = copies_of(shape).norm if work.counted else None
    kept = 4.0 if shape.norm == "rms" or copies == WITHOUT_WEIGHT else work.widths.compute
    if copies == LAYER_FP32:
        kept = 8.0
    if work.adapter is None and copies in (RMS_FP32, LAYER_FP32):
        kept += 4  # for the gradient of the norm's own weight
    elif work.adapter is None and shape.norm == "rms":
        kept += work.stream
    if work.adapter is None and work.loss != "pieces":
        kept += work.widths.compute
    return kept * shape.hidden


def kept_logit_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """Logits that the model returned beside the loss live on while the backward pass runs."""
    if not work.returns_logits or not cut.ends:
        return 0.0
    width = 4 if work.loss == "shifted" else 2
    return work.tokens / cut.context * work.scored * shape.vocab / cut.tensor * width


def working_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What a layer needs beyond what it keeps while its backward pass runs: the gradients of the
    MLP's wide tensors, and with sequence parallelism the rows gathered from the other slices."""
    tokens = work.tokens / cut.context * work.widths.compute
    if work.counted:
        compiled = work.kernels == "compiled"
        count = _compiled_working(shape, work) if compiled else _eager_working(shape, work)
        # On its own, a weight's gradient is there in 16 bits before it is cast to fp32.
        weight = shape.largest_linear if work.wide_stream and not compiled else 0
        sent = 0
        if cut.expert > 1 and shape.experts is not None:  # rows on their way to other ranks
            sent = shape.experts.per_token * shape.hidden
        wide = tokens * (count + sent) + weight * work.widths.compute
        return max(wide, _scores_at_work(shape, work, tokens)) / cut.tensor
    wide = (3 if shape.gated else 2) * mlp_width(shape) / cut.tensor
    gathered = 3 * shape.hidden if work.sequence_parallel and cut.tensor > 1 else 0
    return max((wide + gathered) * tokens, _scores_at_work(shape, work, tokens) / cut.tensor)


def _scores_at_work(shape: ModelShape, work: Workload, tokens: float) -> float:
    """Attention that writes scores down, in the backward pass: gradients of the softmax's result
    and of the scores, and the result in another width. What the MLP kept is gone by then."""
    if work.attention != "eager":
        return 0.0
    gone = mlp_numbers(shape, work) if work.kernels == "eager" else mlp_width(shape)
    return tokens * (3 * shape.heads * work.scores / work.sequence - gone)


def passing_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What a layer needs in the forward pass beyond what it keeps: peft turns the input of the
    last linear, the widest, to fp32, which a compiler doesn't write down."""
    if not work.autocast or work.kernels != "eager" or not adapts_last(shape, work):
        return 0.0
    return 3 * mlp_width(shape) * work.widths.compute * work.tokens / cut.context / cut.tensor


def _eager_working(shape: ModelShape, work: Workload) -> float:
    """Numbers a token: gradients of the MLP's products, and of the stream. An adapter's input has
    a gradient of its own, in fp32 where peft had cast it to that."""
    wide = 2 if shape.gated else 1
    if work.autocast and adapts_last(shape, work):
        return (wide + 1) * mlp_width(shape) + 6 * shape.hidden
    return wide * mlp_width(shape) + 2.25 * shape.hidden


def _compiled_working(shape: ModelShape, work: Workload) -> float:
    """Numbers a token: the activation once more, its gradient, and those of what went into it;
    and two of the stream. A gated MLP with LoRA of a small rank needs no activation; what goes back
    to its first adapters is there in parts, of 64 columns each."""
    wide = (2 if shape.gated else 1) + 2.0
    if work.adapter is not None and shape.gated and adapts_last(shape, work):
        rank = work.adapter.rank
        wide += 2 * rank / 64 - 1 if rank <= LARGEST_SUMMED_RANK else 0
    return wide * mlp_width(shape) + 2 * shape.hidden * work.stream / work.widths.compute
