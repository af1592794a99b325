"""Llama and those built like it: separate or fused projections, gated MLPs, experts."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.core.model.architectures.fields import Fields
from shardtune.core.model.architectures.mlp import mlp, routed
from shardtune.core.model.architectures.tensors import (
    Tensors,
    buffer,
    head,
    linear,
    norm,
    placed,
    table,
    vector,
)
from shardtune.core.model.architectures.traits import TRAITS, Traits
from shardtune.core.model.shape import Experts, ModelShape, Weight


def llama_like(fields: Fields, family: str) -> ModelShape:
    """A model whose architecture stands in `TRAITS`."""
    traits = TRAITS[family]
    known = traits.defaults
    hidden = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers")
    heads = fields.count("num_attention_heads", default=known.get("num_attention_heads"))
    usual_keys = _usual(fields, "num_key_value_heads", known) or heads
    kv_heads = fields.count("num_key_value_heads", default=usual_keys)
    head_dim = _head_dim(fields, hidden, heads, known)
    ffn = fields.count("intermediate_size")
    vocab = fields.count("vocab_size", default=known.get("vocab_size"))
    tied = fields.flag("tie_word_embeddings", traits.tied)
    window, windowed = _window(fields, traits, layers)
    experts = _experts(fields, traits, layers, ffn)
    attention = _attention(fields, traits, hidden, heads, kv_heads, head_dim)
    dense = mlp("mlp", traits, hidden, ffn, bias=traits.mlp_bias.of(fields))
    activation = fields.word("hidden_activation", "hidden_act", default=traits.activation)
    if activation == "xielu":  # learns its two slopes
        dense += [*vector("mlp.act_fn.alpha_p", 1), *vector("mlp.act_fn.alpha_n", 1)]
        dense += [*buffer("mlp.act_fn.beta"), *buffer("mlp.act_fn.eps")]
    parallel = traits.parallel.of(fields)
    names = traits.norms[:1] if parallel else traits.norms
    norms = [weight for name in names for weight in _norm(traits, name, hidden)]
    weights = [
        *placed("embedding", 1, table("embed_tokens", vocab, hidden)),
        *placed("layer", layers - (experts.layers if experts else 0), attention, dense, norms),
        *(_mixture(traits, experts, hidden, attention + norms) if experts else []),
        *placed("root", 1, _norm(traits, "norm", hidden)),
        *head(vocab, hidden, tied=tied),
    ]
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
        gated=len(traits.mlp) == 3,
        activation=activation,
        tied=tied,
        norm=traits.norm,
        weights=tuple(weights),
        qk_norm=_has_qk_norm(fields, traits),
        parallel=parallel,
        rotates_by_length=family == "phi3" and _rotates_by_length(fields),
        max_positions=fields.optional("max_position_embeddings", default=0) or 0,
        dropout=fields.share(traits.dropout) if traits.dropout else 0.0,
        attention_dropout=fields.share("attention_dropout"),
        window=window,
        windowed_layers=windowed,
        experts=experts if experts and experts.layers else None,
    )


def _rotates_by_length(fields: Fields) -> bool:
    """Whether a Phi-3's positions are LongRoPE: by name, or by the length first trained on."""
    said = fields.config.get("rope_parameters") or fields.config.get("rope_scaling")
    if isinstance(said, Mapping):
        return said.get("rope_type", said.get("type")) in ("longrope", "su", "yarn")
    first = fields.optional("original_max_position_embeddings", default=0) or 0
    return 0 < first < (fields.optional("max_position_embeddings", default=0) or 0)


def _usual(fields: Fields, key: str, known: Mapping[str, int]) -> int | None:
    """What transformers takes where the config says nothing. Where it says null, keys have as
    many heads as queries, and each has its share of the width."""
    return None if key in fields.config else known.get(key)


def _head_dim(fields: Fields, hidden: int, heads: int, known: Mapping[str, int]) -> int:
    given = fields.optional("head_dim", default=_usual(fields, "head_dim", known))
    return given or fields.divided("num_attention_heads", hidden, heads)


def _attention(
    fields: Fields, traits: Traits, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> Tensors:
    queries, keys = heads * head_dim, kv_heads * head_dim
    bias = traits.qkv_bias.of(fields)
    found: Tensors = []
    if traits.fused:
        found += linear("self_attn.qkv_proj", queries + 2 * keys, hidden, bias=bias)
    else:
        found += linear("self_attn.q_proj", queries, hidden, bias=bias)
        found += linear("self_attn.k_proj", keys, hidden, bias=bias)
        found += linear("self_attn.v_proj", keys, hidden, bias=bias)
    found += linear("self_attn.o_proj", hidden, queries, bias=traits.output_bias.of(fields))
    if _has_qk_norm(fields, traits):
        for name, count in zip(traits.qk_norms, (heads, kv_heads), strict=True):
            found += _qk_norm(traits, f"self_attn.{name}", count, head_dim)
    if traits.mixture == "biased":  # GPT-OSS lets each head look at nothing
        found += vector("self_attn.sinks", heads)
    return found


def _has_qk_norm(fields: Fields, traits: Traits) -> bool:
    there = not traits.qk_norm_key or fields.flag(traits.qk_norm_key, False)
    return traits.qk_norm != "no" and there


def _qk_norm(traits: Traits, name: str, heads: int, head_dim: int) -> Tensors:
    if traits.qk_norm == "each":
        return [w for n in range(heads) for w in norm(f"{name}.norms.{n}", head_dim)]
    if traits.qk_norm == "heads":
        return [Weight(f"{name}.weight", (heads, head_dim), "root", "norm")]
    return norm(name, head_dim if traits.qk_norm == "head" else heads * head_dim)


def _norm(traits: Traits, name: str, size: int) -> Tensors:
    return norm(name, size, bias=traits.norm_bias) if traits.norm_weights else []


def _window(fields: Fields, traits: Traits, layers: int) -> tuple[int | None, int]:
    """What the window sees, and how many layers have it."""
    if traits.window == "no":
        return None, 0
    absent = "sliding_window" not in fields.config
    size = fields.optional(
        "sliding_window", default=traits.defaults.get("sliding_window") if absent else None
    )
    if not size:
        return None, 0
    count = _windowed(fields, traits, layers)
    return (size, count) if count else (None, 0)


def _windowed(fields: Fields, traits: Traits, layers: int) -> int:
    """How many layers have the window, as transformers' config of the family chooses them."""
    keys = traits.window_keys
    types = fields.items("layer_types") if "layer_types" in keys else None
    if types is not None:
        return types.count("sliding_attention")
    if "use_sliding_window" in keys and not fields.flag("use_sliding_window", False):
        return 0
    if traits.window == "all":
        return layers
    if traits.window == "every":
        read = "sliding_window_pattern" in keys
        every = fields.count("sliding_window_pattern", default=traits.every) if read else 0
        return layers - layers // (every or traits.every)
    if traits.window == "unrotated":
        return _unrotated(fields, layers)
    first = min(fields.optional("max_window_layers", default=28) or 0, layers)
    return layers - first if traits.window == "last" else (first + 1) // 2


def _unrotated(fields: Fields, layers: int) -> int:
    """How many layers have no rotary positions: every n-th, or those that a list has a 0 for."""
    rotates = fields.items("no_rope_layers")
    if rotates is not None:
        return layers - sum(map(bool, rotates[:layers]))
    return layers // fields.count("no_rope_layer_interval", default=4)


def _experts(fields: Fields, traits: Traits, layers: int, ffn: int) -> Experts | None:
    if traits.mixture == "no":
        return None
    known = traits.defaults
    if traits.mixture == "late":
        width = fields.count("moe_intermediate_size", default=known["expert_ffn"])
        dense = fields.optional("first_k_dense_replace", default=1) or 0
        return Experts(
            count=fields.count("n_routed_experts", "num_local_experts", default=known["experts"]),
            per_token=fields.count("num_experts_per_tok", default=known["per_token"]),
            ffn=width,
            shared_ffn=width * fields.count("n_shared_experts", default=1),
            layers=max(layers - dense, 0),
        )
    shared = traits.mixture == "shared"
    return Experts(
        count=fields.count("num_local_experts", "num_experts", default=known["experts"]),
        per_token=fields.count("num_experts_per_tok", default=known["per_token"]),
        ffn=fields.count("moe_intermediate_size", default=known.get("expert_ffn", ffn)),
        shared_ffn=fields.count("shared_expert_intermediate_size", default=5632) if shared else 0,
        layers=_mixed_layers(fields, layers),
    )


def _mixed_layers(fields: Fields, layers: int) -> int:
    """How many layers have experts: every `step`-th, but for those that are named as dense."""
    step = fields.count("decoder_sparse_step", default=1)
    dense = {index for index in fields.items("mlp_only_layers") or [] if isinstance(index, int)}
    return layers // step - sum(1 for i in dense if 0 <= i < layers and (i + 1) % step == 0)


def _mixture(traits: Traits, experts: Experts, hidden: int, rest: Tensors) -> Tensors:
    """The layers with experts; `rest` is what they have in common with the others."""
    if traits.mixture == "biased":
        found = routed("mlp.router", hidden, experts)
        found += vector("mlp.router.bias", experts.count)
        width = 2 * experts.ffn
        found += vector("mlp.experts.gate_up_proj_bias", experts.count, width, routed=True)
        found += vector("mlp.experts.down_proj_bias", experts.count, hidden, routed=True)
    else:
        found = routed(traits.router, hidden, experts, traits.experts_as)
    if traits.mixture == "late":
        found += buffer("mlp.gate.e_score_correction_bias", experts.count)
        found += mlp("mlp.shared_experts", traits, hidden, experts.shared_ffn)
    elif experts.shared_ffn:
        found += mlp("mlp.shared_expert", traits, hidden, experts.shared_ffn)
        found += linear("mlp.shared_expert_gate", 1, hidden)
    return placed("moe_layer", experts.layers, rest, found)
