"""Models of a few kilobytes in the common families, written as anybody would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_COMMON = {"vocab_size": 67, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}
_LLAMA_LIKE = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_WHOLE_HEADS = {key: value for key, value in _LLAMA_LIKE.items() if key != "num_key_value_heads"}
_PADDED = _LLAMA_LIKE | {"pad_token_id": 0}  # their own padding token lies beyond 67
_HEADS_OF_8 = _PADDED | {"head_dim": 8}
_MIXTURE = _PADDED | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = _PADDED | {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": 67, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
_GPT2_ENDS = _GPT2 | {"bos_token_id": 0, "eos_token_id": 1}
_LATENT = _PADDED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_GEMMA4 = _LLAMA_LIKE | {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,  # the last two take keys and values from those before them
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 67,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
}

_MAMBA = _PADDED | {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_DELTA = _HEADS_OF_8 | {  # GatedDeltaNet
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_DELTA_EXPERTS = _DELTA | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_SHORT = _PADDED | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}

CONFIGS: dict[str, dict[str, Any]] = {
    "apertus": _PADDED,
    "arcee": _LLAMA_LIKE,
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "bloom": {"vocab_size": 67, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "codegen": _GPT2_ENDS | {"n_ctx": 64, "rotary_dim": 4},
    "cohere": _PADDED,
    "cohere2": _PADDED
    | {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "deepseek_v2": _LATENT | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": _LATENT | {"n_group": 2, "topk_group": 1},
    "ernie4_5": _PADDED,
    "exaone4": _PADDED,
    "falcon": {
        "vocab_size": 67,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},
    "gemma": _HEADS_OF_8,
    "gemma2": _HEADS_OF_8 | {"sliding_window": 16},
    "gemma3_text": _HEADS_OF_8
    | {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "gemma4_text": _GEMMA4,
    "glm": _HEADS_OF_8,
    "glm4": _HEADS_OF_8,
    "glm4_moe": _HEADS_OF_8
    | {
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2_ENDS,
    "gpt_neo": {
        "vocab_size": 67,
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global", "local", "global"], 1]],
        "window_size": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "gpt_neox": _WHOLE_HEADS,
    "gpt_oss": _LOCAL_EXPERTS | {"head_dim": 8, "sliding_window": 16},
    "gptj": _GPT2_ENDS | {"rotary_dim": 4},
    "granite": _PADDED,
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoehybrid": _MAMBA
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "helium": _HEADS_OF_8,
    "hunyuan_v1_dense": _HEADS_OF_8,
    "lfm2": _SHORT,
    "lfm2_moe": _SHORT
    | {
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
    },
    "llama": _LLAMA_LIKE,
    "ministral": _HEADS_OF_8,
    "mistral": _LLAMA_LIKE,
    "mixtral": _LOCAL_EXPERTS,
    "mpt": {"vocab_size": 67, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
    "nemotron": _PADDED,
    "nemotron_h": _HEADS_OF_8
    | {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "attention", "mlp"],
    },
    "olmo": _PADDED,
    "olmo2": _PADDED,
    "olmo3": _PADDED | {"sliding_window": 16},
    "olmoe": _PADDED | {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "vocab_size": 67,
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "persimmon": _WHOLE_HEADS | {"pad_token_id": 0},
    "phi": _PADDED,
    "phi3": _PADDED,
    "qwen2": _LLAMA_LIKE | {"tie_word_embeddings": True},
    "qwen2_moe": _MIXTURE | {"shared_expert_intermediate_size": 24},
    "qwen3": _LLAMA_LIKE | {"head_dim": 8},
    "qwen3_5_moe_text": _DELTA_EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_moe": _MIXTURE | {"head_dim": 8},
    "qwen3_next": _DELTA_EXPERTS,
    "seed_oss": _HEADS_OF_8,
    "smollm3": _PADDED,
    "stablelm": _PADDED,
    "starcoder2": _PADDED,
    "xglm": {
        "vocab_size": 67,
        "max_position_embeddings": 64,
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 3,
        "attention_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
}
"""By transformers' `model_type`. 67 tokens, so that no even split of them exists."""


MULTIMODAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma4": (_GEMMA4, _VISION | {"num_key_value_heads": 2}),
    "mistral3": (_HEADS_OF_8 | {"model_type": "mistral"}, _VISION | {"model_type": "pixtral"}),
    "qwen2_5_vl": (
        _LLAMA_LIKE | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        _QWEN_VISION,
    ),
    "qwen3_vl": (_HEADS_OF_8, _QWEN_VISION | {"deepstack_visual_indexes": [0]}),
}
"""Models that also take pictures: the text part, and the encoder. Transformers has no class for the
text of the last three alone."""


LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 12,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 12,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 5.0, 6.0, 9.0],
    },
}
"""Makes of a Phi-3 one whose texts of more than 12 tokens are rotated otherwise."""

UNLISTED: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": _PADDED
    | {
        "moe_intermediate_size": 24,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "glm_moe_dsa": _LATENT
    | {"n_group": 1, "topk_group": 1, "index_n_heads": 64, "index_head_dim": 16, "index_topk": 8},
}
"""Families that no table of ours names. Some of their weights only choose, experts or tokens, and
never have a gradient."""
EXPERTS_OTHERWISE: dict[str, dict[str, Any]] = {
    "aria_text": _PADDED
    | {"head_dim": 8, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "jetmoe": _LOCAL_EXPERTS | {"kv_channels": 8},
    "llama4_text": _HEADS_OF_8
    | {
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
    },
}
"""Mixtures whose experts are counted otherwise (Aria), or built otherwise, than those of most."""


def config(family: str, **changes: Any) -> Any:
    """A small configuration of `family`."""
    from transformers import AutoConfig

    if family in MULTIMODAL:
        text, vision = MULTIMODAL[family]
        return AutoConfig.for_model(family, text_config=text | changes, vision_config=vision)
    return AutoConfig.for_model(
        family, **(CONFIGS | UNLISTED | EXPERTS_OTHERWISE)[family] | changes
    )


def transformers_class(family: str) -> Any:
    """The class of transformers that makes a model of `family`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox")


def write(folder: Path, family: str, *, shard: str = "5GB", **changes: Any) -> Any:
    """Writes a model with random weights to `folder`; returns it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers_class(family).from_config(config(family, **changes))
        for parameter in model.parameters():  # also those that usually start at zero or one
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
