"""GPT-2 and its descendants: plain MLPs, layer norms, mostly fused projections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardtune.core.model.architectures.fields import Fields
from shardtune.core.model.architectures.tensors import Tensors, head, linear, norm, placed, table
from shardtune.core.model.shape import ModelShape
from shardtune.core.model.weight import WeightKind


@dataclass(frozen=True)
class GptSizes:
    """What every model of these families has."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool
    head_dim: int

    @property
    def fused(self) -> int:
        """Outputs of one matrix that makes queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def shape(self, fields: Fields, family: str, weights: Tensors, **facts: Any) -> ModelShape:
        """The model, given what is special about its family."""
        return ModelShape(
            name=fields.name,
            family=family,
            vocab=self.vocab,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            ffn=self.ffn,
            gated=False,
            tied=self.tied,
            norm="layer",
            weights=tuple(weights),
            **facts,
        )


_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_POSITIONS = ("max_position_embeddings", "n_positions")


def _sizes(fields: Fields, *ffn_keys: str, tied: bool, usual_ffn: int | None = None) -> GptSizes:
    """`usual_ffn` is what transformers takes where the config says nothing, if not four times the
    hidden width."""
    hidden = fields.count(*_HIDDEN)
    heads = fields.count(*_HEADS)
    return GptSizes(
        vocab=fields.count("vocab_size"),
        hidden=hidden,
        layers=fields.count(*_LAYERS),
        heads=heads,
        kv_heads=heads,
        ffn=fields.count(*ffn_keys, default=usual_ffn or 4 * hidden) if ffn_keys else 4 * hidden,
        tied=fields.flag("tie_word_embeddings", tied),
        head_dim=fields.divided("num_attention_heads", hidden, heads),
    )


def gpt2(fields: Fields, family: str) -> ModelShape:
    """GPT-2, and GPT-BigCode, which has ordinary linear modules and one head for keys."""
    sizes = _sizes(fields, "n_inner", tied=True)
    kind: WeightKind = "conv1d"
    if family == "gpt_bigcode":
        kind = "linear"
        if fields.flag("multi_query", True):
            sizes = replace(sizes, kv_heads=1)
    h, ffn = sizes.hidden, sizes.ffn
    positions = fields.count(*_POSITIONS, default=1024)
    layer = [
        *norm("ln_1", h, bias=True),
        *linear("attn.c_attn", sizes.fused, h, bias=True, kind=kind),
        *linear("attn.c_proj", h, h, bias=True, kind=kind),
        *norm("ln_2", h, bias=True),
        *linear("mlp.c_fc", ffn, h, bias=True, kind=kind),
        *linear("mlp.c_proj", h, ffn, bias=True, kind=kind),
    ]
    weights = [
        *placed("embedding", 1, table("wte", sizes.vocab, h), table("wpe", positions, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("ln_f", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied),
    ]
    gelu = "gelu_new" if family == "gpt2" else "gelu_pytorch_tanh"
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("activation_function", default=gelu),
        positions="learned",
        max_positions=positions,
        dropout=fields.share("resid_pdrop", default=0.1),
        attention_dropout=fields.share("attn_pdrop", default=0.1),
    )


def gptj(fields: Fields, family: str) -> ModelShape:
    """GPT-J: one norm before attention and MLP, which stand side by side."""
    sizes = _sizes(fields, "n_inner", tied=False)
    h = sizes.hidden
    layer = [
        *norm("ln_1", h, bias=True),
        *(w for name in ("k_proj", "v_proj", "q_proj") for w in linear(f"attn.{name}", h, h)),
        *linear("attn.out_proj", h, h),
        *linear("mlp.fc_in", sizes.ffn, h, bias=True),
        *linear("mlp.fc_out", h, sizes.ffn, bias=True),
    ]
    weights = [
        *placed("embedding", 1, table("wte", sizes.vocab, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("ln_f", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied, bias=True),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("activation_function", default="gelu_new"),
        parallel=True,
        max_positions=fields.optional(*_POSITIONS, default=2048) or 0,
        dropout=fields.share("resid_pdrop"),
        attention_dropout=fields.share("attn_pdrop"),
    )


def codegen(fields: Fields, family: str) -> ModelShape:
    """CodeGen: GPT-J with one matrix for queries, keys and values."""
    sizes = _sizes(fields, "n_inner", tied=False)
    h = sizes.hidden
    layer = [
        *norm("ln_1", h, bias=True),
        *linear("attn.qkv_proj", sizes.fused, h),
        *linear("attn.out_proj", h, h),
        *linear("mlp.fc_in", sizes.ffn, h, bias=True),
        *linear("mlp.fc_out", h, sizes.ffn, bias=True),
    ]
    weights = [
        *placed("embedding", 1, table("wte", sizes.vocab, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("ln_f", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied, bias=True),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("activation_function", default="gelu_new"),
        parallel=True,
        max_positions=fields.optional(*_POSITIONS, default=2048) or 0,
        dropout=fields.share("resid_pdrop"),
        attention_dropout=fields.share("attn_pdrop"),
    )


def gpt_neo(fields: Fields, family: str) -> ModelShape:
    """GPT-Neo: GPT-2 with separate projections; every second layer sees a window."""
    sizes = _sizes(fields, "intermediate_size", tied=True)
    h = sizes.hidden
    positions = fields.count(*_POSITIONS, default=2048)
    projections = ("k_proj", "v_proj", "q_proj")
    layer = [
        *norm("ln_1", h, bias=True),
        *(w for name in projections for w in linear(f"attn.attention.{name}", h, h)),
        *linear("attn.attention.out_proj", h, h, bias=True),
        *norm("ln_2", h, bias=True),
        *linear("mlp.c_fc", sizes.ffn, h, bias=True),
        *linear("mlp.c_proj", h, sizes.ffn, bias=True),
    ]
    weights = [
        *placed("embedding", 1, table("wte", sizes.vocab, h), table("wpe", positions, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("ln_f", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied),
    ]
    kinds = fields.items("attention_layers")
    local = kinds.count("local") if kinds is not None else sizes.layers // 2
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("activation_function", default="gelu_new"),
        positions="learned",
        max_positions=positions,
        dropout=fields.share("resid_dropout"),
        attention_dropout=fields.share("attention_dropout"),
        window=fields.count("window_size", default=256) if local else None,
        windowed_layers=local,
    )


def gpt_neox(fields: Fields, family: str) -> ModelShape:
    """GPT-NeoX and Pythia: two norms, attention and MLP side by side unless told otherwise."""
    sizes = _sizes(fields, "intermediate_size", tied=False, usual_ffn=24576)
    h = sizes.hidden
    bias = fields.flag("attention_bias", True)
    layer = [
        *norm("input_layernorm", h, bias=True),
        *norm("post_attention_layernorm", h, bias=True),
        *linear("attention.query_key_value", sizes.fused, h, bias=bias),
        *linear("attention.dense", h, h, bias=bias),
        *linear("mlp.dense_h_to_4h", sizes.ffn, h, bias=True),
        *linear("mlp.dense_4h_to_h", h, sizes.ffn, bias=True),
    ]
    weights = [
        *placed("embedding", 1, table("embed_in", sizes.vocab, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("final_layer_norm", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("hidden_act", default="gelu"),
        parallel=fields.flag("use_parallel_residual", True),
        max_positions=fields.optional(*_POSITIONS, default=2048) or 0,
        dropout=fields.share("hidden_dropout"),
        attention_dropout=fields.share("attention_dropout"),
    )


def persimmon(fields: Fields, family: str) -> ModelShape:
    """Persimmon: fused projections, squared ReLUs, and norms of queries and keys."""
    sizes = _sizes(fields, "intermediate_size", tied=False, usual_ffn=16384)
    h = sizes.hidden
    qk_norm = fields.flag("qk_layernorm", True)
    names = ("q_layernorm", "k_layernorm") if qk_norm else ()
    layer = [
        *linear("self_attn.query_key_value", sizes.fused, h, bias=True),
        *linear("self_attn.dense", h, h, bias=True),
        *(w for name in names for w in norm(f"self_attn.{name}", sizes.head_dim, bias=True)),
        *linear("mlp.dense_h_to_4h", sizes.ffn, h, bias=True),
        *linear("mlp.dense_4h_to_h", h, sizes.ffn, bias=True),
        *norm("input_layernorm", h, bias=True),
        *norm("post_attention_layernorm", h, bias=True),
    ]
    weights = [
        *placed("embedding", 1, table("embed_tokens", sizes.vocab, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("final_layernorm", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("hidden_act", default="relu2"),
        qk_norm=qk_norm,
        max_positions=fields.optional(*_POSITIONS, default=16384) or 0,
        dropout=fields.share("hidden_dropout"),
        attention_dropout=fields.share("attention_dropout"),
    )


def falcon(fields: Fields, family: str) -> ModelShape:
    """Falcon, in its three shapes: one head for keys, groups of them, or all."""
    sizes = _sizes(fields, "ffn_hidden_size", tied=True)
    grouped = fields.flag("new_decoder_architecture", False)
    side_by_side = grouped or fields.flag("parallel_attn", True)
    if grouped:
        sizes = replace(sizes, kv_heads=fields.count("num_kv_heads", default=sizes.heads))
    elif fields.flag("multi_query", True):
        sizes = replace(sizes, kv_heads=1)
    h, bias = sizes.hidden, fields.flag("bias", False)
    layer = [
        *linear("self_attention.query_key_value", sizes.fused, h, bias=bias),
        *linear("self_attention.dense", h, h, bias=bias),
        *linear("mlp.dense_h_to_4h", sizes.ffn, h, bias=bias),
        *linear("mlp.dense_4h_to_h", h, sizes.ffn, bias=bias),
    ]
    norms = fields.optional("num_ln_in_parallel_attn", default=2 if grouped else 1)
    if not fields.flag("parallel_attn", True):
        names: tuple[str, ...] = ("post_attention_layernorm", "input_layernorm")
    else:
        names = ("ln_attn", "ln_mlp") if norms == 2 else ("input_layernorm",)
    weights = [
        *placed("embedding", 1, table("word_embeddings", sizes.vocab, h)),
        *placed("layer", sizes.layers, layer, *(norm(name, h, bias=True) for name in names)),
        *placed("root", 1, norm("ln_f", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("activation", default="gelu"),
        parallel=side_by_side,
        positions="alibi" if fields.flag("alibi", False) else "rotary",
        max_positions=fields.optional(*_POSITIONS, default=2048) or 0,
        dropout=fields.share("hidden_dropout"),
        attention_dropout=fields.share("attention_dropout"),
    )


def bloom(fields: Fields, family: str) -> ModelShape:
    """BLOOM: ALiBi, and a norm right after the embedding."""
    sizes = _sizes(fields, tied=True)
    h = sizes.hidden
    layer = [
        *norm("input_layernorm", h, bias=True),
        *linear("self_attention.query_key_value", sizes.fused, h, bias=True),
        *linear("self_attention.dense", h, h, bias=True),
        *norm("post_attention_layernorm", h, bias=True),
        *linear("mlp.dense_h_to_4h", sizes.ffn, h, bias=True),
        *linear("mlp.dense_4h_to_h", h, sizes.ffn, bias=True),
    ]
    weights = [
        *placed("embedding", 1, table("word_embeddings", sizes.vocab, h)),
        *placed("root", 1, norm("word_embeddings_layernorm", h, bias=True)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("ln_f", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation="gelu",
        positions="alibi",
        max_positions=fields.optional("seq_length", default=0) or 0,
        dropout=fields.share("hidden_dropout"),
        attention_dropout=fields.share("attention_dropout"),
    )


def phi(fields: Fields, family: str) -> ModelShape:
    """Phi-1 to Phi-2: one norm, attention and MLP side by side, and biases everywhere."""
    sizes = _sizes(fields, "intermediate_size", tied=False, usual_ffn=8192)
    sizes = replace(sizes, kv_heads=fields.count("num_key_value_heads", default=sizes.heads))
    h, keys = sizes.hidden, sizes.kv_heads * sizes.head_dim
    qk_norm = fields.flag("qk_layernorm", False)
    names = ("q_layernorm", "k_layernorm") if qk_norm else ()
    layer = [
        *linear("self_attn.q_proj", h, h, bias=True),
        *linear("self_attn.k_proj", keys, h, bias=True),
        *linear("self_attn.v_proj", keys, h, bias=True),
        *linear("self_attn.dense", h, h, bias=True),
        *(w for name in names for w in norm(f"self_attn.{name}", sizes.head_dim, bias=True)),
        *linear("mlp.fc1", sizes.ffn, h, bias=True),
        *linear("mlp.fc2", h, sizes.ffn, bias=True),
        *norm("input_layernorm", h, bias=True),
    ]
    weights = [
        *placed("embedding", 1, table("embed_tokens", sizes.vocab, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("final_layernorm", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied, bias=True),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("hidden_act", default="gelu_new"),
        qk_norm=qk_norm,
        parallel=True,
        max_positions=fields.optional(*_POSITIONS, default=2048) or 0,
        dropout=fields.share("resid_pdrop"),
        attention_dropout=fields.share("attention_dropout"),
    )


def opt(fields: Fields, family: str) -> ModelShape:
    """OPT: learned positions (two more than it says), and in one size a narrower embedding."""
    sizes = _sizes(fields, "ffn_dim", tied=True, usual_ffn=3072)
    h = sizes.hidden
    bias = fields.flag("enable_bias", True)
    affine = fields.flag("layer_norm_elementwise_affine", True)
    narrow = fields.count("word_embed_proj_dim", default=h)
    positions = fields.count(*_POSITIONS, default=2048)
    ends = fields.flag("do_layer_norm_before", True) and not fields.flag(
        "_remove_final_layer_norm", False
    )

    def normed(name: str) -> Tensors:
        return norm(name, h, bias=True) if affine else []

    layer = [
        *(
            weight
            for name in ("k_proj", "v_proj", "q_proj", "out_proj")
            for weight in linear(f"self_attn.{name}", h, h, bias=bias)
        ),
        *normed("self_attn_layer_norm"),
        *linear("fc1", sizes.ffn, h, bias=bias),
        *linear("fc2", h, sizes.ffn, bias=bias),
        *normed("final_layer_norm"),
    ]
    detour = [*linear("project_out", narrow, h), *linear("project_in", h, narrow)]
    weights = [
        *placed("embedding", 1, table("embed_tokens", sizes.vocab, narrow)),
        *placed("embedding", 1, table("embed_positions", positions + 2, h)),
        *placed("root", 1, detour if narrow != h else []),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, normed("final_layer_norm") if ends else []),
        *head(sizes.vocab, narrow, tied=sizes.tied),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("activation_function", default="relu"),
        positions="learned",
        max_positions=positions,
        dropout=fields.share("dropout", default=0.1),
        attention_dropout=fields.share("attention_dropout"),
    )


def xglm(fields: Fields, family: str) -> ModelShape:
    """XGLM: OPT's layers, with positions that are computed and not learned."""
    sizes = _sizes(fields, "ffn_dim", tied=True, usual_ffn=4096)
    h = sizes.hidden
    layer = [
        *(
            weight
            for name in ("k_proj", "v_proj", "q_proj", "out_proj")
            for weight in linear(f"self_attn.{name}", h, h, bias=True)
        ),
        *norm("self_attn_layer_norm", h, bias=True),
        *linear("fc1", sizes.ffn, h, bias=True),
        *linear("fc2", h, sizes.ffn, bias=True),
        *norm("final_layer_norm", h, bias=True),
    ]
    weights = [
        *placed("embedding", 1, table("embed_tokens", sizes.vocab, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("layer_norm", h, bias=True)),
        *head(sizes.vocab, h, tied=sizes.tied),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation=fields.word("activation_function", default="gelu"),
        positions="sinusoidal",
        max_positions=fields.optional(*_POSITIONS, default=2048) or 0,
        dropout=fields.share("dropout", default=0.1),
        attention_dropout=fields.share("attention_dropout", default=0.1),
    )


def mpt(fields: Fields, family: str) -> ModelShape:
    """MPT: ALiBi and no biases at all, not even in the norms."""
    sizes = _sizes(fields, tied=True)
    h = sizes.hidden
    layer = [
        *norm("norm_1", h),
        *linear("attn.Wqkv", sizes.fused, h),
        *linear("attn.out_proj", h, h),
        *norm("norm_2", h),
        *linear("ffn.up_proj", sizes.ffn, h),
        *linear("ffn.down_proj", h, sizes.ffn),
    ]
    weights = [
        *placed("embedding", 1, table("wte", sizes.vocab, h)),
        *placed("layer", sizes.layers, layer),
        *placed("root", 1, norm("norm_f", h)),
        *head(sizes.vocab, h, tied=sizes.tied),
    ]
    return sizes.shape(
        fields,
        family,
        weights,
        activation="gelu",
        positions="alibi",
        max_positions=fields.optional("max_seq_len", default=2048) or 0,
        dropout=fields.share("resid_pdrop"),
    )
