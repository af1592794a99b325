"""DeepSeek: attention through a narrow latent, and experts beside shared ones."""

from __future__ import annotations

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
)
from shardtune.core.model.architectures.traits import EXPERT, PRE_NORMS, Traits
from shardtune.core.model.shape import Experts, ModelShape

_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")


def deepseek(fields: Fields, family: str) -> ModelShape:
    """DeepSeek V2 and V3: latent attention, and experts after the first layers."""
    hidden = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers")
    heads = fields.count("num_attention_heads")
    ffn, vocab = fields.count("intermediate_size"), fields.count("vocab_size")
    rope = fields.count("qk_rope_head_dim", default=64)
    head_dim = fields.count("qk_nope_head_dim", default=128) + rope
    value_dim = fields.count("v_head_dim", default=128)
    tied = fields.flag("tie_word_embeddings", False)
    third = family == "deepseek_v3"
    dense = fields.optional("first_k_dense_replace", default=3 if third else 0) or 0
    width = fields.count("moe_intermediate_size", default=2048 if third else 1407)
    experts = Experts(
        count=fields.count(*_COUNTS, default=256 if third else 64),
        per_token=fields.count("num_experts_per_tok", default=8 if third else None),
        ffn=width,
        shared_ffn=width * fields.count("n_shared_experts", default=1 if third else 2),
        layers=max(layers - dense, 0),
    )
    attention = _latent_attention(fields, hidden, heads, head_dim, value_dim, rope)
    norms = [weight for name in PRE_NORMS for weight in norm(name, hidden)]
    bias = not third and fields.flag("mlp_bias", False)
    moe = [
        *routed("mlp.gate", hidden, experts, EXPERT),
        *(buffer("mlp.gate.e_score_correction_bias", experts.count) if third else []),
        *mlp("mlp.shared_experts", Traits(), hidden, experts.shared_ffn, bias=bias),
    ]
    whole = mlp("mlp", Traits(), hidden, ffn, bias=bias)
    weights = [
        *placed("embedding", 1, table("embed_tokens", vocab, hidden)),
        *placed("layer", layers - experts.layers, attention, whole, norms),
        *placed("moe_layer", experts.layers, attention, moe, norms),
        *placed("root", 1, norm("norm", hidden)),
        *head(vocab, hidden, tied=tied),
    ]
    return ModelShape(
        name=fields.name,
        family=family,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        ffn=ffn,
        gated=True,
        activation=fields.word("hidden_act", default="silu"),
        tied=tied,
        norm="rms",
        weights=tuple(weights),
        max_positions=fields.optional("max_position_embeddings", default=0) or 0,
        attention_dropout=fields.share("attention_dropout"),
        experts=experts if experts.layers else None,
    )


def _latent_attention(
    fields: Fields, hidden: int, heads: int, head_dim: int, value_dim: int, rope: int
) -> Tensors:
    bias = fields.flag("attention_bias", False)
    # A config that says null has queries without a detour, one that says nothing the usual rank.
    absent = "q_lora_rank" not in fields.config
    rank = fields.optional("q_lora_rank", default=1536 if absent else None)
    latent = fields.count("kv_lora_rank", default=512)
    found: Tensors = []
    if rank is None:
        found += linear("self_attn.q_proj", heads * head_dim, hidden)
    else:
        found += linear("self_attn.q_a_proj", rank, hidden, bias=bias)
        found += norm("self_attn.q_a_layernorm", rank)
        found += linear("self_attn.q_b_proj", heads * head_dim, rank)
    found += linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias=bias)
    found += norm("self_attn.kv_a_layernorm", latent)
    found += linear("self_attn.kv_b_proj", heads * (head_dim - rope + value_dim), latent)
    found += linear("self_attn.o_proj", hidden, heads * value_dim, bias=bias)
    return found
