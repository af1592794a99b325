"""What our own layers keep, and what they compute again, by `train.gradient_checkpointing`.

Matmuls and attention are what a level chooses among (`models/fused/activation_checkpointing.py`);
small operations are repeated at every level, where layers are compiled or a level other than `none`
or `full` was asked for. Families whose experts are multiplied in other ways are counted alike.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

from shardtune.core.model.activation_memory import WIDE_MATMUL
from shardtune.core.model.adapter_size import RANK_MULTIPLE
from shardtune.core.model.fused_families import LARGEST_EXPERT_RANK, OWN_GATE_FAMILIES
from shardtune.core.model.shape import LAYER_PARTS, MATMUL_KINDS, ModelShape, Weight
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.workload import SHAPES, Checkpointing, Workload

ATTENTION_INPUTS = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "c_attn", "query_key_value", "qkv_proj", "q", "k", "v",
        "W_pack", "Wqkv", "q_a_proj", "kv_a_proj_with_mqa",
    }
)  # fmt: skip
MLP_INPUTS = frozenset(
    {
        "gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "wi_0",
        "wi_1", "wi",
    }
)  # fmt: skip
ATTENTION_OUTPUTS = frozenset({"o_proj", "out_proj", "dense", "o", "c_proj"})
MLP_OUTPUTS = frozenset({"down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "wo"})
ExpertsWay = Literal["transformers", "grouped", "fused"]
"""By transformers, by our grouped products with adapters beside them, or by those and kernels that
have the adapters inside (`models/experts/swiglu_experts.py`)."""
STATISTICS = 4
"""Bytes that attention keeps for a row of each head."""


@lru_cache(maxsize=SHAPES)
def products(shape: ModelShape) -> tuple[tuple[Weight, float], ...]:
    """The matrices of an average layer, each with how often a token meets it there."""
    layers = shape.layers + shape.encoder_layers
    return tuple(
        (weight, weight.times / layers * math.prod(weight.shape[:-2]) * met(weight, shape))
        for weight in shape.weights
        if weight.part in LAYER_PARTS and weight.kind in MATMUL_KINDS
    )


def met(weight: Weight, shape: ModelShape) -> float:
    """Share of the tokens that one copy of a weight sees: all, or those sent to an expert."""
    if not weight.routed:
        return 1.0
    assert shape.experts is not None
    return shape.experts.per_token / shape.experts.count


def leaf(weight: Weight) -> str:
    """The last part of a matrix's name: experts of a layer are one parameter of their module."""
    return weight.name.removesuffix(".weight").rpartition(".")[2]


def experts_way(shape: ModelShape, work: Workload) -> ExpertsWay | None:
    """Who multiplies experts, and how; None where a model has none."""
    if shape.experts is None:
        return None
    adapter = work.adapter
    if adapter is None or not any(weight.routed for weight in adapter.on(shape)):
        return "transformers"
    plain = shape.family not in OWN_GATE_FAMILIES
    return "fused" if plain and adapter.expert_rank <= LARGEST_EXPERT_RANK else "grouped"


def readers(weight: Weight, shape: ModelShape) -> int:
    """How many matrices of a layer read the same input as this one, itself among them."""
    own, names = leaf(weight), _multiplied(shape)
    return max(len(names & each) if own in each else 1 for each in (ATTENTION_INPUTS, MLP_INPUTS))


@lru_cache(maxsize=SHAPES)
def _multiplied(shape: ModelShape) -> frozenset[str]:
    """The matrices of a layer, by the last part of their names."""
    return frozenset(leaf(each) for each, _ in products(shape))


def is_last(weight: Weight) -> bool:
    """Whether its result ends the layer, so that no backward pass needs it."""
    return leaf(weight) in MLP_OUTPUTS and "attn" not in weight.module


def is_repeated(weight: Weight, level: Checkpointing) -> bool:
    """Whether the backward pass multiplies with it once more, as the forward pass did."""
    outputs, inputs = weight.features
    if level == "full":
        return True
    wide = outputs > WIDE_MATMUL * inputs
    return not is_last(weight) and (level == "most" or (level == "mlp" and wide))


def kept_bytes(shape: ModelShape, work: Workload, cut: RankShare, level: Checkpointing) -> float:
    """What one layer keeps of one micro-batch at a level other than `full`: its input, attention's
    result with its statistics or scores, and the results of products that aren't repeated.

    The compiler leaves out a result that no backward pass needs; run on its own, torch's selective
    checkpointing keeps it all the same.
    """
    compiled = work.kernels == "compiled"
    way = experts_way(shape, work)
    inside = _attention_bytes(shape, work, level)
    for weight, times in products(shape):
        if level == "most":
            break
        repeated = is_repeated(weight, level)
        # transformers weights what experts give, and keeps it for the router's gradient.
        last = is_last(weight) and not (weight.routed and way == "transformers")
        if not (repeated or (compiled and last)):
            # With dropout apart an adapter's result and the frozen one's are two; so they are where
            # an expert's is a grouped product.
            apart = work.drops_apart or (weight.routed and way == "grouped")
            results = 2 if apart else 1
            inside += times * weight.features[0] * work.widths.compute * results
        # Compiled, a wide product and the adapters' with its input are one, but in 8 bits.
        joint = compiled and repeated and (weight.routed or not work.fp8)
        if work.adapter is not None and not (joint and not work.adapter.dropout):
            rank = work.adapter.rank
            if weight.routed:
                rank = -(-work.adapter.expert_rank // RANK_MULTIPLE) * RANK_MULTIPLE
            inside += times * rank * work.widths.compute
    spread = cut.tensor if work.sequence_parallel else 1
    outside = shape.hidden * work.stream / spread
    return (inside / cut.tensor + outside) * work.tokens / cut.context


def _attention_bytes(shape: ModelShape, work: Workload, level: Checkpointing) -> float:
    """Bytes a token that attention keeps. Where it writes scores down it is two products like any
    others: queries with keys, which give a score for each pair, and these with values."""
    result = shape.heads * shape.value_dim * work.widths.compute
    if work.attention != "eager":
        return result + shape.heads * STATISTICS
    if level == "most":
        return 0.0
    scores = shape.heads * work.scores / work.sequence * work.widths.compute
    return result + (scores if saves_scores(shape, work, level) else 0.0)


def saves_scores(shape: ModelShape, work: Workload, level: Checkpointing) -> bool:
    """Whether scores that are written down are kept: they are a product, and wide in long rows."""
    wide = work.sequence > WIDE_MATMUL * shape.head_dim
    return level == "none" or (level == "mlp" and not wide)
