"""What a forward pass leaves behind for the backward pass: closed forms, in bytes.

Widths are counted for one token. A tensor appears once for each copy that autograd keeps; which
copies those are depends on how the small operations run and on what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from shardtune.core.activation_memory import loss_chunk_rows
from shardtune.core.model.shape import LAYER_PARTS, ModelPart, ModelShape
from shardtune.plan.estimate.constants import MemoryConstants
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.saved_tensors import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUTS,
    MLP_INPUTS,
    MLP_OUTPUTS,
    kept_bytes,
)
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
    norms, readers = _norms(shape, work), _read(shape, work)
    # Our slices read what was gathered, all tokens of it, and keep that.
    total = norms / spread + readers / (1 if work.counted else spread)
    attentions = _attention(shape, work) * attention_blocks(shape)
    total += (attentions + _mlp(shape, work)) / cut.tensor
    total *= width * tokens
    if work.attention == "eager":
        scores = work.micro_batch * work.scores / cut.context
        total += scores * shape.heads / cut.tensor * _score(work)
    if work.dropout:
        total += 2 * shape.hidden * tokens / spread  # a byte for each of two masks
        total += mlp_width(shape) * tokens / cut.tensor if work.pair else 0.0  # and in the MLP
    if work.adapter is not None:
        total += _adapters(shape, work) * tokens / cut.tensor
    return total


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
    layers = (shape.layers + shape.encoder_layers) / cut.pipeline
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
        return 0.0 if work.offloaded_checkpoints else boundary_bytes(shape, work, cut)
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
        return tokens * (each * shape.vocab / cut.tensor + _top(shape, work))
    each = {
        "plain": k.plain_logit if cut.tensor == 1 else k.sliced_logit,
        "shifted": k.shifted_logit,
        "compiled": k.compiled_logit,
        "chunked": k.chunked_logit,
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
    return total + tokens * (_top(shape, work) + 3 * shape.hidden * work.stream)


def _top(shape: ModelShape, work: Workload) -> float:
    """Bytes a token that the last norm keeps, and the head of its input. It is never compiled."""
    kept = 4.0 if shape.norm == "rms" else work.widths.compute
    if work.adapter is None and shape.norm == "rms":
        kept += work.stream  # for the gradient of the norm's own weight
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
        # On its own, a weight's gradient is there in 16 bits before it is turned to fp32.
        weight = shape.largest_linear if work.wide_stream and not compiled else 0
        return (tokens * count + weight * work.widths.compute) / cut.tensor
    wide = (3 if shape.gated else 2) * mlp_width(shape) / cut.tensor
    gathered = 3 * shape.hidden if work.sequence_parallel and cut.tensor > 1 else 0
    return (wide + gathered) * tokens


def passing_bytes(shape: ModelShape, work: Workload, cut: RankShare) -> float:
    """What a layer needs in the forward pass beyond what it keeps: peft turns the input of the
    last linear, the widest, to fp32, which a compiler doesn't write down."""
    if not work.autocast or work.kernels != "eager" or not _adapts_last(shape, work):
        return 0.0
    return 3 * mlp_width(shape) * work.widths.compute * work.tokens / cut.context / cut.tensor


def _adapts_last(shape: ModelShape, work: Workload) -> bool:
    return not MLP_OUTPUTS.isdisjoint(work.adapts(shape))


def _eager_working(shape: ModelShape, work: Workload) -> float:
    """Numbers a token: gradients of the MLP's products, and of the stream. An adapter's input has
    a gradient of its own, in fp32 where peft had turned it to that."""
    wide = 2 if shape.gated else 1
    if work.autocast and _adapts_last(shape, work):
        return (wide + 1) * mlp_width(shape) + 6 * shape.hidden
    return wide * mlp_width(shape) + 2.25 * shape.hidden


def _compiled_working(shape: ModelShape, work: Workload) -> float:
    """Numbers a token: the activation once more, its gradient, and those of what went into it;
    and two of the stream. A gated MLP with LoRA needs no activation; what goes back to its first
    adapters is there in parts, of 64 columns each."""
    wide = (2 if shape.gated else 1) + 2.0
    if work.adapter is not None and shape.gated and _adapts_last(shape, work):
        wide += 2 * work.adapter.rank / 64 - 1
    return wide * mlp_width(shape) + 2 * shape.hidden * work.stream / work.widths.compute


def mlp_width(shape: ModelShape) -> float:
    """The MLP's width that a token meets."""
    if shape.experts is None:
        return shape.ffn
    return shape.experts.per_token * shape.experts.ffn + shape.experts.shared_ffn


def attention_blocks(shape: ModelShape) -> float:
    """Attentions of an average layer: behind an encoder, a decoder's layer has two."""
    if not shape.encoder_layers:
        return 1.0
    return 1 + shape.layers / (shape.layers + shape.encoder_layers)


def norm_count(shape: ModelShape) -> float:
    """Norms of the residual stream in a layer: one, two, or four where results are normed too; on
    average, where a decoder's layers have more than an encoder's."""
    if shape.encoder_layers:
        return _mean(shape, lambda part: _norms_in(shape, part))
    return _norms_in(shape, max(LAYER_PARTS, key=shape.layer_parameters))


def _norms_in(shape: ModelShape, layer: ModelPart) -> int:
    return sum(
        weight.kind == "norm"
        and weight.name.endswith(".weight")
        and weight.size == shape.hidden
        and not weight.module.endswith(("q_norm", "k_norm"))
        for weight in shape.in_part(layer)
    )


def _mean(shape: ModelShape, count: Callable[[ModelPart], float]) -> float:
    """Over the layers of an encoder and a decoder."""
    layers = shape.layers + shape.encoder_layers
    encoder, decoder = count("encoder_layer"), count("layer")
    return (shape.encoder_layers * encoder + shape.layers * decoder) / layers


def _reading(shape: ModelShape, names: Collection[str]) -> float:
    """How many linears of a layer have one of these names; a decoder behind an encoder has those of
    attention twice."""
    if not shape.encoder_layers:
        return len(names)
    return _mean(
        shape,
        lambda part: sum(
            weight.linear and weight.module.rpartition(".")[2] in names
            for weight in shape.in_part(part)
        ),
    )


def _norms(shape: ModelShape, work: Workload) -> float:
    """Norms and the residual stream, in numbers of 16 bits a token."""
    norms = norm_count(shape)
    if work.autocast:
        return _cast_norms(shape, work, norms) * shape.hidden
    if work.kernels == "eager" and shape.norm == "rms":
        # Turned to fp32 by hand; the 16-bit result is kept where the norm's weight is trained.
        inside = 2.0 if work.adapter is not None else 3.0
    else:
        inside = 1.0
    return inside * norms * shape.hidden


def _cast_norms(shape: ModelShape, work: Workload, norms: float) -> float:
    """The same under autocast, in hidden sizes. Compiled, only the beginning of the stream is kept
    in fp32, with what was added to it."""
    if work.adapter is not None:
        return norms if work.kernels == "compiled" else 2 * norms
    if work.kernels == "compiled":
        return norms + 1
    return (4 if shape.norm == "rms" else 2) * norms


def _read(shape: ModelShape, work: Workload) -> float:
    """What the linears behind the norms keep of their input, in numbers of 16 bits a token.

    Under autocast every linear on its own casts its input anew and keeps that. Compiled, or where
    there is nothing to cast, attention and MLP each keep one.
    """
    adapted = work.adapts(shape)
    # Four-bit linears of bitsandbytes keep their input, though their weight is frozen.
    every = work.adapter is None or (_keeps_packed_inputs(work) and not work.autocast)
    if work.autocast and work.kernels != "compiled":
        readers = stream_readers(shape)
        reading = readers if every else readers & frozenset(adapted)
        return _reading(shape, reading) * shape.hidden
    sides: float = sum(
        every or not names.isdisjoint(adapted) for names in (ATTENTION_INPUTS, MLP_INPUTS)
    )
    norms = norm_count(shape)
    if work.autocast and work.adapter is None:
        sides = norms  # one behind each
    return min(sides, norms) * shape.hidden


def stream_readers(shape: ModelShape) -> frozenset[str]:
    """The linears of a layer that read the residual stream."""
    layer = max(LAYER_PARTS, key=shape.layer_parameters)
    names = {weight.module.rpartition(".")[2] for weight in shape.in_part(layer)}
    return (ATTENTION_INPUTS | MLP_INPUTS) & names


def _keeps_packed_inputs(work: Workload) -> bool:
    return work.packed_bits is not None and work.packed_inputs


def _attention(shape: ModelShape, work: Workload) -> float:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.value_dim
    kept = 2 * q + 2 * kv
    if shape.qk_norm:
        frozen = work.counted and work.adapter is not None  # the norms' own weights
        kept += ((2 if frozen else 3) if work.kernels == "eager" else 1) * (q + kv)
    if work.autocast and not ATTENTION_OUTPUTS.isdisjoint(work.adapts(shape)):
        kept += q  # the result once more, cast to fp32 and back for the adapter
    return kept


def _mlp(shape: ModelShape, work: Workload) -> float:
    width = mlp_width(shape)
    last = work.adapter is None or _keeps_packed_inputs(work) or _adapts_last(shape, work)
    if not shape.gated:
        return width * (1 + last)
    return width * ((3 if work.kernels == "eager" else 2) + last)


def _score(work: Workload) -> float:
    """Bytes of a score that is written down: the softmax's fp32 result and its 16-bit copy."""
    softmax = 6 if work.kernels == "eager" else 2
    return softmax + (3 if work.dropout else 0)


def _adapters(shape: ModelShape, work: Workload) -> float:
    """Bytes a token: what lies between the two factors, and what dropout makes of their input."""
    assert work.adapter is not None
    inputs = {w.module: w.shape[-1] for w in work.adapter.on(shape)}
    between = work.adapter.rank * len(inputs) * work.widths.compute if work.counted else 0.0
    if not work.drops_apart:
        return between
    # Each adapted linear keeps its own dropped input, and the mask. Casts are its own anyway.
    dropped = 1 if work.autocast else work.widths.compute + 1
    return between + sum(inputs.values()) * dropped
