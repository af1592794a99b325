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
_GEMMA4 = _LLAMA_LIKE | {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,  # the last two take keys and values from those before them
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 67,
}


def config(family: str, **changes: Any) -> Any:
    """A small configuration of `family`; 67 tokens, so that no even split of them exists."""
    import transformers

    return {
        "llama": lambda: transformers.LlamaConfig(**_LLAMA_LIKE | changes),
        "qwen2": lambda: transformers.Qwen2Config(
            **_LLAMA_LIKE | {"tie_word_embeddings": True} | changes
        ),
        "qwen3": lambda: transformers.Qwen3Config(**_LLAMA_LIKE | {"head_dim": 8} | changes),
        "mistral": lambda: transformers.MistralConfig(**_LLAMA_LIKE | changes),
        "gpt2": lambda: transformers.GPT2Config(
            **{"vocab_size": 67, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
            | changes
        ),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(
            **{k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"} | changes
        ),
        "gemma4_text": lambda: transformers.Gemma4TextConfig(**_GEMMA4 | changes),
        "gemma4": lambda: transformers.Gemma4Config(
            text_config=_GEMMA4 | changes,
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
        ),
    }[family]()


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox")


def write(folder: Path, family: str, *, shard: str = "5GB", **changes: Any) -> Any:
    """Writes a model with random weights to `folder`; returns it."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config(family, **changes))
        for parameter in model.parameters():  # also those that usually start at zero or one
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
