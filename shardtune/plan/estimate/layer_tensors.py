"""What one layer keeps for its backward pass, tensor by tensor, in numbers of 16 bits a token.

A tensor appears once for each copy that autograd keeps; which copies those are depends on how the
small operations run, on what is trained and on the model's family (`family_copies.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import lru_cache

from shardtune.core.model.adapter_size import RANK_MULTIPLE
from shardtune.core.model.family_support import SINK_FAMILIES
from shardtune.core.model.shape import LAYER_PARTS, ModelPart, ModelShape
from shardtune.plan.estimate.family_copies import (
    ACTIVATION_COPIES,
    LAYER_FP32,
    NATIVE,
    WITHOUT_WEIGHT,
    ActivationCopies,
    FamilyCopies,
    copies_of,
)
from shardtune.plan.estimate.saved_tensors import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUTS,
    MLP_INPUTS,
    MLP_OUTPUTS,
)
from shardtune.plan.estimate.workload import SHAPES, Workload

BESIDE = frozenset({"per_layer_input_gate", "shared_expert_gate"})
"""Linears that read the residual stream and belong to neither attention nor an MLP."""
FED = "per_layer_input_gate"
"""The linear that meets what a second embedding feeds to each layer (Gemma 4)."""


def by_family(work: Workload) -> bool:
    """Whether the layers are transformers' own: run as they are written, in an engine of ours."""
    return work.counted and work.kernels == "eager" and work.pair is None


# Widths ------------------------------------------------------------------------------------------


def mlp_width(shape: ModelShape) -> float:
    """The MLP's width that a token meets."""
    if shape.experts is None:
        return shape.ffn
    return shape.experts.per_token * shape.experts.ffn + shape.experts.shared_ffn


@lru_cache(maxsize=SHAPES)
def head_widths(shape: ModelShape) -> tuple[float, float]:
    """Queries' and values' width in an average layer."""
    found = []
    usual = (shape.heads * shape.head_dim, shape.kv_heads * shape.value_dim)
    for name, width in zip(("q_proj", "k_proj"), usual, strict=True):
        own = [w for w in shape.linears if w.module.endswith(f".{name}") and w.part in LAYER_PARTS]
        differ = len({weight.shape for weight in own}) > 1 and not shape.encoder_layers
        times = sum(weight.times for weight in own)
        sizes = sum(weight.features[0] * weight.times for weight in own)
        found.append(sizes / times if differ else float(width))
    return found[0], found[1]


def attention_blocks(shape: ModelShape) -> float:
    """Attentions of an average layer: behind an encoder, a decoder's layer has two."""
    if not shape.encoder_layers:
        return 1.0
    return 1 + shape.layers / (shape.layers + shape.encoder_layers)


@lru_cache(maxsize=SHAPES)
def norm_count(shape: ModelShape) -> float:
    """Norms of the residual stream in a layer: one, two, or four where results are normed too; on
    average, where a decoder's layers have more than an encoder's."""
    if shape.encoder_layers:
        return _mean(shape, lambda part: _norms_in(shape, part))
    found = _norms_in(shape, max(LAYER_PARTS, key=shape.layer_parameters))
    return found or 2  # OLMo's have no weights


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


@lru_cache(maxsize=SHAPES)
def stream_readers(shape: ModelShape) -> frozenset[str]:
    """The linears of a layer that read the residual stream."""
    return (ATTENTION_INPUTS | MLP_INPUTS) & _names(shape)


@lru_cache(maxsize=SHAPES)
def _names(shape: ModelShape) -> frozenset[str]:
    layer = max(LAYER_PARTS, key=shape.layer_parameters)
    return frozenset(weight.module.rpartition(".")[2] for weight in shape.in_part(layer))


# Norms and the stream ----------------------------------------------------------------------------


def norm_numbers(shape: ModelShape, work: Workload) -> float:
    """Norms and the residual stream."""
    norms = norm_count(shape)
    if work.autocast:
        return _cast_norms(shape, work, norms) * shape.hidden
    if by_family(work):
        copies = copies_of(shape).norm
        assert copies is not None
        each = copies.kept(trained=work.adapter is None, width=work.widths.compute)
        # Side by side, several norms keep the same input.
        return each * (1 if copies == NATIVE and shape.parallel else norms) * shape.hidden
    if work.kernels == "eager" and shape.norm == "rms":
        # Cast to fp32 by hand; the 16-bit result is kept where the norm's weight is trained.
        inside = 2.0 if work.adapter is not None else 3.0
    else:
        inside = 1.0
    return inside * norms * shape.hidden


def _cast_norms(shape: ModelShape, work: Workload, norms: float) -> float:
    """The same under autocast, in hidden sizes. Compiled, only the beginning of the stream is kept
    in fp32, with what was added to it."""
    if work.adapter is not None:
        if work.kernels == "compiled":
            return norms
        twice = by_family(work) and copies_of(shape).norm == LAYER_FP32
        return (4 if twice else 2) * norms
    if work.kernels == "compiled":
        return norms + 1
    return (4 if shape.norm == "rms" else 2) * norms


def read_numbers(shape: ModelShape, work: Workload) -> float:
    """What the linears behind the norms keep of their input.

    Under autocast every linear on its own casts its input anew and keeps that. Compiled, or where
    there is nothing to cast, attention and MLP each keep one.
    """
    adapted = frozenset(work.adapts(shape))
    # Four-bit linears of bitsandbytes keep their input, though their weight is frozen.
    every = work.adapter is None or (_keeps_packed_inputs(work) and not work.autocast)
    own = _names(shape)
    beside = 0.0
    if by_family(work):
        copies = copies_of(shape)
        beside = copies.stream + every * (copies.router + (FED in own))
    if work.autocast and work.kernels != "compiled":
        readers = stream_readers(shape) | (BESIDE & own if by_family(work) else frozenset())
        reading = readers if every else readers & adapted
        return (_reading(shape, reading) + beside) * shape.hidden
    if work.stacked_qkv and not every:
        return 0.0  # dropout's result alone, which is counted with the adapters
    sides: float = sum(
        every or not names.isdisjoint(adapted) for names in (ATTENTION_INPUTS, MLP_INPUTS)
    )
    norms = norm_count(shape)
    if work.autocast and work.adapter is None:
        sides = norms  # one behind each
    return (min(sides, norms) + beside) * shape.hidden


def _keeps_packed_inputs(work: Workload) -> bool:
    return work.packed_bits is not None and work.packed_inputs


# Attention ---------------------------------------------------------------------------------------


def attention_numbers(shape: ModelShape, work: Workload) -> float:
    """Queries, keys, values and the result; norms and copies of them."""
    q, kv = head_widths(shape)
    adapts_output = work.autocast and not ATTENTION_OUTPUTS.isdisjoint(work.adapts(shape))
    if not by_family(work):
        kept = 2 * q + 2 * kv
        if shape.qk_norm:
            frozen = work.counted and work.adapter is not None  # the norms' own weights
            kept += ((2 if frozen else 3) if work.kernels == "eager" else 1) * (q + kv)
        if work.stacked_qkv:
            kept += q + kv + q * _keeps_packed_inputs(work)
        return kept + q * adapts_output  # the result, cast to fp32 and back for the adapter
    copies = copies_of(shape)
    if writes_scores(shape, work) and work.attention != "eager":
        return 7 * q  # torch's own way, in fp32: queries, keys, values; and the result
    # With a mask, and where scores are written down, keys and values are repeated for all heads.
    repeated = kv + _masked(shape, work) * (q - kv)
    # Written down, scores give a result that is kept as what the output projection reads alone.
    kept = 2 * q + 2 * repeated + q * (adapts_output and work.attention != "eager")
    fused = not _names(shape).isdisjoint({"query_key_value", "qkv_proj"})
    fused = fused and not copies.broadcasts_keys
    if fused and shape.positions == "rotary" and work.attention != "eager":
        kept += q + kv  # values are a part of the product, and keep all of it
    if copies.joins_heads and work.attention != "eager" and not adapts_output:
        kept += q
    if shape.qk_norm:
        assert copies.norm is not None
        each = copies.norm.kept(trained=work.adapter is None, width=work.widths.compute)
        kept += (0 if fused and copies.norm == NATIVE else each) * (q + kv)
    if copies.value_norm:
        kept += WITHOUT_WEIGHT.kept(trained=False, width=work.widths.compute) * kv
    return kept + _latent(shape, work)


def _latent(shape: ModelShape, work: Workload) -> float:
    """The narrow detours of DeepSeek's queries, keys and values: normed, and read once more."""
    widths = sum(
        weight.size * weight.times
        for weight in shape.weights
        if weight.module.endswith(("q_a_layernorm", "kv_a_layernorm"))
    )
    return (4 if work.adapter is None else 3) * widths / shape.layers


def _masked(shape: ModelShape, work: Workload) -> float:
    """Share of the layers whose attention repeats keys and values: those with a mask, or all."""
    if work.attention == "eager" or copies_of(shape).broadcasts_keys:
        return 1.0
    if shape.family in SINK_FAMILIES:
        return 0.0  # by our kernel, which is told the window
    inside = shape.window is not None and shape.window < work.sequence
    return shape.windowed_layers / shape.layers if inside else 0.0


def mask_bytes(shape: ModelShape, work: Workload) -> float:
    """A sliding window's mask, which attention keeps in an average layer."""
    if not by_family(work) or writes_scores(shape, work):
        return 0.0
    return _masked(shape, work) * work.micro_batch * work.scores * work.widths.compute


def writes_scores(shape: ModelShape, work: Workload) -> bool:
    """Whether attention keeps a number for each pair of tokens."""
    broadcasts = by_family(work) and copies_of(shape).broadcasts_keys and shape.kv_heads == 1
    return work.attention == "eager" or broadcasts


def score_bytes(shape: ModelShape, work: Workload) -> float:
    """Bytes of a score that is written down: the softmax's fp32 result and its 16-bit copy."""
    if work.attention != "eager":
        return 4.0
    softmax = 6.0 if work.kernels == "eager" else 2.0
    if by_family(work):
        # On a GPU autocast computes every softmax in fp32.
        found = copies_of(shape).score
        softmax = max(found, softmax) if work.autocast else found
    return softmax + (3 if work.attention_dropout else 0)


# MLP ---------------------------------------------------------------------------------------------


def adapts_last(shape: ModelShape, work: Workload) -> bool:
    """Whether the MLP's last linear has an adapter."""
    return not MLP_OUTPUTS.isdisjoint(work.adapts(shape))


def adapts_experts(shape: ModelShape, work: Workload) -> bool:
    """Whether experts have adapters."""
    if work.adapter is None or (work.adapter.trained is not None and work.adapter.rank < 1):
        return False
    return any(weight.routed for weight in work.adapter.on(shape))


def mlp_numbers(shape: ModelShape, work: Workload, load: float = 1.0) -> float:
    """The MLP's products, its activation and what its last linear reads. Experts see `load` times
    as many tokens as on average."""
    last = work.adapter is None or _keeps_packed_inputs(work) or adapts_last(shape, work)
    if not by_family(work):
        each = ((3 if work.kernels == "eager" else 2) if shape.gated else 1) + last
        return mlp_width(shape) * each
    copies = copies_of(shape)
    dense = _copies_inside(shape, work, copies, last=last) + last
    fed = sum(w.features[0] for w in shape.linears if w.module == FED)
    kept = (8 if work.adapter is None else 6) * fed
    experts = shape.experts
    if experts is None:
        return kept + dense * shape.ffn
    mixed = experts.layers / shape.layers
    routed = load * experts.per_token * _expert_numbers(shape, work, copies)
    inside = routed + dense * experts.shared_ffn
    return kept + mixed * inside + (1 - mixed) * dense * shape.ffn


def _expert_numbers(shape: ModelShape, work: Workload, copies: FamilyCopies) -> float:
    """Of a token in one of its experts.

    transformers weights what an expert gives, and keeps that for the router's gradient. Grouped
    products (`models/experts/grouped_experts.py`) weight what the last one reads, and keep it from
    before, and weighted where an adapter reads it; a bias is weighted on its own.
    """
    assert shape.experts is not None
    inside, adapted = 2 + copies.gate, adapts_experts(shape, work)
    if adapted or work.restores_weights:
        biased = any(each.routed and each.kind == "vector" for each in shape.weights)
        return shape.experts.ffn * (inside + 1 + adapted) + shape.hidden * (adapted + biased)
    trained = work.adapter is None
    return shape.experts.ffn * (inside + trained) + shape.hidden * (1 + trained)


def _copies_inside(shape: ModelShape, work: Workload, copies: FamilyCopies, *, last: bool) -> float:
    """Of an MLP's width, without what the last linear reads; `last` says whether that is kept."""
    if shape.gated:
        return 2 + copies.gate
    found = ACTIVATION_COPIES.get(shape.activation, ActivationCopies())
    trained = work.adapter is None
    # Under autocast an adapter reads the result in an fp32 copy of its own.
    same = found.result and last and (trained or not work.autocast)
    return (found.trained if trained else found.frozen) - same


def expert_factor_bytes(shape: ModelShape, work: Workload) -> float:
    """LoRA factors of a layer's experts as grouped products keep them: in the dtype of the
    computation, with ranks filled up. Under autocast the factors themselves are among its casts
    (`casts_of`), and only what fills them up comes on top."""
    if not by_family(work) or not adapts_experts(shape, work):
        return 0.0
    assert work.adapter is not None
    rank = work.adapter.expert_rank
    columns = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE - (rank if work.autocast else 0)
    sides = sum(
        math.prod(weight.shape[:-2]) * sum(weight.shape[-2:]) * weight.times
        for weight in work.adapter.on(shape)
        if weight.routed
    )
    return columns * sides * work.widths.compute / shape.layers


# Adapters ----------------------------------------------------------------------------------------


def adapter_bytes(shape: ModelShape, work: Workload) -> float:
    """Bytes a token: what lies between the two factors, and what dropout makes of their input."""
    assert work.adapter is not None
    if work.adapter.scaled_inputs is not None:
        return _factor_bytes(shape, work)
    inputs = {w.module: w.shape[-1] for w in work.adapter.on(shape)}
    between = work.adapter.rank * len(inputs) * work.widths.compute if work.counted else 0.0
    if work.adapter.keeps_results:
        outputs = {w.module: w.features[0] for w in work.adapter.on(shape)}
        between += 2 * sum(outputs.values()) * work.widths.compute
    if not work.drops_apart:
        return between
    if work.stacked_qkv:
        q, kv = head_widths(shape)
        return shape.hidden * (work.widths.compute + 1) + (q + kv) * work.widths.compute
    # Each adapted linear keeps its own dropped input, and the mask. Casts are its own anyway.
    dropped = 1 if work.autocast else work.widths.compute + 1
    return between + sum(inputs.values()) * dropped


def _factor_bytes(shape: ModelShape, work: Workload) -> float:
    """What gradients of IA3's factors need: what a factor scales. An input is counted where it is
    read (`mlp_numbers`); under autocast peft casts it to fp32 and keeps that."""
    assert work.adapter is not None
    layers = shape.layers + shape.encoder_layers
    kept = 0.0
    for weight in work.adapter.on(shape):
        if work.adapter.scales_result(weight):
            kept += weight.features[0] * work.widths.compute * weight.times
        elif work.autocast:
            kept += weight.features[1] * (4 - work.widths.compute) * weight.times
    return kept / layers
