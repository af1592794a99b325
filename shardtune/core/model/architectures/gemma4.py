"""Gemma 4's text model: heads that differ by layer, and a second embedding that feeds each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardtune.core.model.architectures.fields import Fields
from shardtune.core.model.architectures.mlp import mlp
from shardtune.core.model.architectures.tensors import (
    Tensors,
    buffer,
    head,
    linear,
    matrix,
    norm,
    placed,
    table,
    vector,
)
from shardtune.core.model.architectures.traits import SANDWICH_NORMS, Traits
from shardtune.core.model.shape import Experts, ModelPart, ModelShape

FULL = "full_attention"
PATTERN = 6
"""Every sixth layer sees everything, where the config doesn't list them."""


def gemma4_text(fields: Fields, family: str) -> ModelShape:
    """Layers with a window have smaller heads than those that see everything. The last ones may
    take keys and values from layers before them, and then may have an MLP twice as wide."""
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size", default=262144)
    heads = fields.count("num_attention_heads", default=8)
    kv_heads = fields.count("num_key_value_heads", default=4)
    head_dim = fields.count("head_dim", default=256)
    ffn = fields.count("intermediate_size")
    kinds = _kinds(fields, fields.count("num_hidden_layers"))
    layers = len(kinds)
    shared = fields.optional("num_kv_shared_layers", default=0) or 0
    tied = fields.flag("tie_word_embeddings", True)
    experts = _experts(fields, layers, ffn)
    part: ModelPart = "moe_layer" if experts else "layer"
    heads_of = _heads(fields, kinds)
    attentions = Counter(
        (kind, each, layer >= layers - shared)
        for layer, (kind, each) in enumerate(zip(kinds, heads_of, strict=True))
    )
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    weights = [
        *placed("embedding", 1, table("embed_tokens", vocab, hidden)),
        *(
            tensor
            for (kind, each, reuses), times in attentions.items()
            for tensor in placed(
                part, times, _attention(fields, hidden, each, full=kind == FULL, reuses=reuses)
            )
        ),
        *placed(part, layers - shared, mlp("mlp", Traits(), hidden, ffn)),
        *placed(part, shared, mlp("mlp", Traits(), hidden, wide * ffn)),
        *placed(part, layers, *(norm(name, hidden) for name in SANDWICH_NORMS)),
        *placed(part, layers, buffer("layer_scalar", 1)),
        *placed(part, layers, _mixture(hidden, experts) if experts else []),
        *_fed(fields, hidden, layers, part),
        *placed("root", 1, norm("norm", hidden)),
        *head(vocab, hidden, tied=tied),
    ]
    window = fields.count("sliding_window", default=512)
    windowed = layers - kinds.count(FULL)
    return ModelShape(
        name=fields.name,
        family=family,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        ffn=ffn,
        gated=True,
        activation=fields.word("hidden_activation", default="gelu_pytorch_tanh"),
        tied=tied,
        norm="rms",
        weights=tuple(weights),
        qk_norm=True,
        max_positions=fields.optional("max_position_embeddings", default=131072) or 0,
        attention_dropout=fields.share("attention_dropout"),
        window=window if windowed else None,
        windowed_layers=windowed,
        experts=experts,
    )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """The kind of attention of each layer; the last always sees everything."""
    given = fields.items("layer_types")
    if given is None:
        given = ["" if (i + 1) % PATTERN else FULL for i in range(layers)]
    return [*map(str, given[: layers - 1]), FULL]


def _heads(fields: Fields, kinds: list[str]) -> list[tuple[int, int]]:
    """Width of a head, and how many there are of keys, layer by layer. Published configs have keys
    of their own for layers that see everything; transformers saves what differs by layer."""
    usual = fields.count("head_dim", default=256), fields.count("num_key_value_heads", default=4)
    differing = fields.config.get("per_layer_config")
    if not isinstance(differing, Mapping):
        return [_heads_of_full(fields, usual) if kind == FULL else usual for kind in kinds]
    found = []
    for layer in range(len(kinds)):
        said = differing.get(str(layer))
        own = Fields(said if isinstance(said, Mapping) else {}, fields.name)
        size, kv_heads = usual
        found.append(
            (
                own.count("head_dim", default=size),
                own.count("num_key_value_heads", default=kv_heads),
            )
        )
        fields.problems += own.problems
    return found


def _heads_of_full(fields: Fields, usual: tuple[int, int]) -> tuple[int, int]:
    size, kv_heads = fields.count("global_head_dim", default=512), usual[1]
    if fields.flag("attention_k_eq_v", False):
        kv_heads = fields.count("num_global_key_value_heads", default=kv_heads)
    return size, kv_heads


def _attention(
    fields: Fields, hidden: int, each: tuple[int, int], *, full: bool, reuses: bool
) -> Tensors:
    heads = fields.count("num_attention_heads", default=8)
    size, kv_heads = each
    bias = fields.flag("attention_bias", False)
    one = full and fields.flag("attention_k_eq_v", False)  # keys are the values, too
    found = [
        *linear("self_attn.q_proj", heads * size, hidden, bias=bias),
        *norm("self_attn.q_norm", size),
        *linear("self_attn.o_proj", hidden, heads * size, bias=bias),
    ]
    if not reuses:
        found += norm("self_attn.k_norm", size)
        found += linear("self_attn.k_proj", kv_heads * size, hidden, bias=bias)
        found += [] if one else linear("self_attn.v_proj", kv_heads * size, hidden, bias=bias)
    return found


def _fed(fields: Fields, hidden: int, layers: int, part: ModelPart) -> Tensors:
    """The second embedding: a few numbers for each layer, added to what it gives."""
    given = fields.optional("hidden_size_per_layer_input", default=256) or 0
    if not given:
        return []
    vocab = fields.count("vocab_size_per_layer_input", default=262144)
    layer = [
        *linear("per_layer_input_gate", given, hidden),
        *linear("per_layer_projection", hidden, given),
        *norm("post_per_layer_input_norm", hidden),
    ]
    return [
        *placed("embedding", 1, table("embed_tokens_per_layer", vocab, layers * given)),
        *placed("root", 1, linear("per_layer_model_projection", layers * given, hidden)),
        *placed("root", 1, norm("per_layer_projection_norm", given)),
        *placed(part, layers, layer),
    ]


def _experts(fields: Fields, layers: int, ffn: int) -> Experts | None:
    """Every layer has them beside its MLP, or none."""
    if not fields.flag("enable_moe_block", False):
        return None
    return Experts(
        count=fields.count("num_experts"),
        per_token=fields.count("top_k_experts"),
        ffn=fields.count("moe_intermediate_size"),
        shared_ffn=ffn,
        layers=layers,
    )


def _mixture(hidden: int, experts: Experts) -> Tensors:
    count = experts.count
    return [
        *vector("router.scale", hidden),
        *vector("router.per_expert_scale", count),
        *matrix("router.proj.weight", count, hidden),
        *matrix("experts.gate_up_proj", count, 2 * experts.ffn, hidden, routed=True),
        *matrix("experts.down_proj", count, hidden, experts.ffn, routed=True),
        *norm("post_feedforward_layernorm_1", hidden),
        *norm("post_feedforward_layernorm_2", hidden),
        *norm("pre_feedforward_layernorm_2", hidden),
    ]
