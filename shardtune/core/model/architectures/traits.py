"""How the architectures that are built like Llama differ from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardtune.core.model.architectures.fields import Fields

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
_POST = ("post_attention_layernorm", "post_feedforward_layernorm")
SANDWICH_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Flag:
    """Whether something is there: as `key` of the config says, else by default."""

    default: bool
    key: str = ""

    def of(self, fields: Fields) -> bool:
        return fields.flag(self.key, self.default) if self.key else self.default


_NO = Flag(False)
EXPERT = ("gate_proj", "up_proj", "down_proj")
_ATTENTION_BIAS = Flag(False, "attention_bias")
_USE_BIAS = Flag(False, "use_bias")
_TYPES, _PATTERN, _SWITCH = "layer_types", "sliding_window_pattern", "use_sliding_window"


@dataclass(frozen=True)
class Traits:
    """How an architecture differs from Llama."""

    tied: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What transformers takes where the config says nothing."""
    activation: str = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norms: tuple[str, ...] = PRE_NORMS
    norm_bias: bool = False
    norm_weights: bool = True
    qk_norm: Literal["no", "head", "whole", "heads", "each"] = "no"
    """A norm for every head, or for all heads at once; `heads` has weights for each of them, `each`
    is a module for each of them."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_key: str = ""
    """The key that says whether it is there, where not every model of the family has it."""
    qkv_bias: Flag = _ATTENTION_BIAS
    output_bias: Flag = _ATTENTION_BIAS
    mlp_bias: Flag = _NO
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of its matrices, the last one last."""
    fused: bool = False
    """Whether one matrix makes queries, keys and values, and one both halves of the MLP."""
    fused_mlp: bool = False
    """Whether one matrix makes both halves of the MLP, while attention has three."""
    parallel: Flag = _NO
    """Whether attention and MLP read the same input, after the first of the norms."""
    window: Literal["no", "all", "every", "last", "odd", "unrotated"] = "no"
    """Layers with a sliding window: none, all, all but every n-th, those from a number on, every
    second one below that number, or those without rotary positions."""
    window_keys: tuple[str, ...] = ()
    """Which of the keys that choose such layers transformers reads; configs have others, too."""
    every: int = 2
    mixture: Literal["no", "plain", "shared", "biased", "late"] = "no"
    """Experts: none, alone, with one that all tokens share, with biases; `late` is DeepSeek's way,
    shared experts beside the others, after the first few layers."""
    experts_as: tuple[str, ...] = ()
    """What the experts' three matrices were called when each was a module. peft still takes
    these names for the experts; not so where there are none."""
    router: str = "mlp.gate"
    """The router's name; the experts stand beside it."""
    dropout: str = ""
    """The key of the residual stream's dropout."""


TRAITS: dict[str, Traits] = {
    "apertus": Traits(
        activation="xielu",
        norms=("attention_layernorm", "feedforward_layernorm"),
        qk_norm="head",
        mlp=("up_proj", "down_proj"),
    ),
    "llama": Traits(mlp_bias=Flag(False, "mlp_bias")),
    "granite": Traits(mlp_bias=Flag(False, "mlp_bias")),
    "smollm3": Traits(
        tied=True,
        defaults={"num_key_value_heads": 4},
        mlp_bias=Flag(False, "mlp_bias"),
        window="unrotated",
        window_keys=(_TYPES, _SWITCH),
    ),
    "mistral": Traits(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=_NO,
        output_bias=_NO,
        window="all",
    ),
    "mixtral": Traits(
        defaults={"num_key_value_heads": 8, "experts": 8, "per_token": 2},
        qkv_bias=_NO,
        output_bias=_NO,
        window="all",
        mixture="plain",
        experts_as=("w1", "w3", "w2"),
    ),
    "qwen2": Traits(
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
        qkv_bias=Flag(True),
        output_bias=_NO,
        window="last",
        window_keys=(_TYPES, _SWITCH),
    ),
    "qwen2_moe": Traits(
        defaults={
            "num_key_value_heads": 16,
            "experts": 60,
            "per_token": 4,
            "expert_ffn": 1408,
            "sliding_window": 4096,
        },
        qkv_bias=Flag(True, "qkv_bias"),
        output_bias=_NO,
        window="odd",
        window_keys=(_TYPES, _SWITCH),
        mixture="shared",
    ),
    "qwen3": Traits(
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        qk_norm="head",
        window="last",
        window_keys=(_TYPES, _SWITCH),
    ),
    "qwen3_moe": Traits(
        defaults={
            "num_key_value_heads": 4,
            "experts": 128,
            "per_token": 8,
            "expert_ffn": 768,
            "sliding_window": 4096,
        },
        qk_norm="head",
        window="all",
        window_keys=(_SWITCH,),
        mixture="plain",
        experts_as=EXPERT,
    ),
    "gemma": Traits(
        tied=True,
        defaults={"num_key_value_heads": 16, "head_dim": 256},
        activation="gelu_pytorch_tanh",
    ),
    "gemma2": Traits(
        tied=True,
        defaults={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        activation="gelu_pytorch_tanh",
        norms=SANDWICH_NORMS,
        window="every",
        window_keys=(_TYPES,),
    ),
    "gemma3_text": Traits(
        tied=True,
        defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
        },
        activation="gelu_pytorch_tanh",
        norms=SANDWICH_NORMS,
        qk_norm="head",
        window="every",
        window_keys=(_TYPES, _PATTERN),
        every=6,
    ),
    "olmo": Traits(norm="layer", norm_weights=False),
    "olmo2": Traits(norms=_POST, qk_norm="whole"),
    "olmoe": Traits(
        defaults={"experts": 64, "per_token": 8},
        qk_norm="whole",
        mixture="plain",
        experts_as=EXPERT,
    ),
    "phi3": Traits(qkv_bias=_NO, output_bias=_NO, fused=True, window="all", dropout="resid_pdrop"),
    "starcoder2": Traits(
        tied=True,
        defaults={"num_key_value_heads": 2},
        activation="gelu_pytorch_tanh",
        norm="layer",
        norm_bias=True,
        qkv_bias=Flag(True, "use_bias"),
        output_bias=Flag(True, "use_bias"),
        mlp_bias=Flag(True, "use_bias"),
        mlp=("c_fc", "c_proj"),
        window="all",
        dropout="residual_dropout",
    ),
    "nemotron": Traits(
        activation="relu2",
        norm="layer",
        norm_bias=True,
        mlp_bias=Flag(False, "mlp_bias"),
        mlp=("up_proj", "down_proj"),
    ),
    "gpt_oss": Traits(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "experts": 128,
            "per_token": 4,
            "sliding_window": 128,
        },
        qkv_bias=Flag(True, "attention_bias"),
        output_bias=Flag(True, "attention_bias"),
        window="every",
        window_keys=(_TYPES,),
        mixture="biased",
    ),
    "arcee": Traits(
        activation="relu2", mlp_bias=Flag(False, "mlp_bias"), mlp=("up_proj", "down_proj")
    ),
    "cohere": Traits(
        tied=True,
        norm="layer",
        norms=PRE_NORMS[:1],
        qk_norm="heads",
        qk_norm_key="use_qk_norm",
        parallel=Flag(True),
    ),
    "cohere2": Traits(
        tied=True,
        defaults={"sliding_window": 4096},
        norm="layer",
        norms=PRE_NORMS[:1],
        window="every",
        window_keys=(_TYPES, _PATTERN),
        every=4,
        parallel=Flag(True),
    ),
    "ernie4_5": Traits(
        tied=True,
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        qkv_bias=_USE_BIAS,
        output_bias=_USE_BIAS,
        mlp_bias=_USE_BIAS,
    ),
    "exaone4": Traits(
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
        norms=_POST,
        qk_norm="head",
        qkv_bias=_NO,
        output_bias=_NO,
        window="every",
        window_keys=(_TYPES, _PATTERN),
        every=4,
    ),
    "glm": Traits(
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        qkv_bias=Flag(True, "attention_bias"),
        output_bias=_NO,
        fused_mlp=True,
    ),
    "glm4": Traits(
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        norms=(*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
        qkv_bias=Flag(True, "attention_bias"),
        output_bias=_NO,
        fused_mlp=True,
    ),
    "glm4_moe": Traits(
        defaults={"num_key_value_heads": 8, "experts": 128, "per_token": 8, "expert_ffn": 1408},
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        output_bias=_NO,
        mixture="late",
        experts_as=EXPERT,
    ),
    "granitemoe": Traits(
        defaults={"experts": 8, "per_token": 2},
        mixture="plain",
        router="block_sparse_moe.router",
    ),
    "helium": Traits(
        defaults={"num_key_value_heads": 20, "head_dim": 128},
        output_bias=_NO,
        mlp_bias=Flag(False, "mlp_bias"),
    ),
    "hunyuan_v1_dense": Traits(qk_norm="head", qk_norms=("query_layernorm", "key_layernorm")),
    "ministral": Traits(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=_NO,
        output_bias=_NO,
        window="all",
        window_keys=(_TYPES,),
    ),
    "olmo3": Traits(
        defaults={"sliding_window": 4096},
        norms=_POST,
        qk_norm="whole",
        window="every",
        window_keys=(_TYPES,),
        every=4,
    ),
    "seed_oss": Traits(
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        qkv_bias=Flag(True, "attention_bias"),
        output_bias=Flag(False, "attention_out_bias"),
        mlp_bias=Flag(False, "mlp_bias"),
        dropout="residual_dropout",
    ),
    "stablelm": Traits(
        defaults={"num_key_value_heads": 32},
        norm="layer",
        norm_bias=True,
        qk_norm="each",
        qk_norms=("q_layernorm", "k_layernorm"),
        qk_norm_key="qk_layernorm",
        qkv_bias=Flag(False, "use_qkv_bias"),
        output_bias=_NO,
        parallel=Flag(False, "use_parallel_residual"),
        dropout="hidden_dropout",
    ),
}
