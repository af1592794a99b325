"""The models that published measurements name, as shapes."""

from __future__ import annotations

from functools import cache

from shardtune.core.model.architectures import read_shape
from shardtune.core.model.shape import ModelShape


def _llama(
    hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, family: str = "llama"
) -> dict[str, object]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }


def _tied(config: dict[str, object]) -> dict[str, object]:
    return {**config, "tie_word_embeddings": True}


def _gpt(hidden: int, layers: int, heads: int, vocab: int = 50368) -> dict[str, object]:
    """Also for MPT, whose llm-foundry tables count learned positions and biases as GPT-2 has."""
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocab,
        "n_positions": 2048,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


LLAMA3_8B = _llama(4096, 32, 32, 8, 14336, 128256)
LLAMA3_70B = _llama(8192, 80, 64, 8, 28672, 128256)
LLAMA2_7B = _llama(4096, 32, 32, 32, 11008, 32000)
LLAMA2_13B = _llama(5120, 40, 40, 40, 13824, 32000)
LLAMA2_70B = _llama(8192, 80, 64, 8, 28672, 32000)
LLAMA3_405B = _llama(16384, 126, 128, 8, 53248, 128256)

CONFIGS: dict[str, dict[str, object]] = {
    "Llama-3.1-8B": LLAMA3_8B,
    "Llama3-8B": LLAMA3_8B,
    "Llama-3.1-70B": LLAMA3_70B,
    "Llama-3.3-70B": LLAMA3_70B,
    "Llama3-70B": LLAMA3_70B,
    "Llama3-70B SFT": LLAMA3_70B,
    "Llama-3.1-405B": LLAMA3_405B,
    "Llama3.1-405B": LLAMA3_405B,
    "Llama3-405B TP4": LLAMA3_405B,
    "Llama-3.2-1B": _tied(_llama(2048, 16, 32, 8, 8192, 128256)),
    "Llama-3.2-3B": _tied(_llama(3072, 28, 24, 8, 8192, 128256)),
    "Llama-2-7B": LLAMA2_7B,
    "Llama2-7B": LLAMA2_7B,
    "Llama 2 (6.74e9)": LLAMA2_7B,
    "Llama2-13B": LLAMA2_13B,
    "Llama 2 (13.0e9)": LLAMA2_13B,
    "Llama-2-70B": LLAMA2_70B,
    "Llama2-70B": LLAMA2_70B,
    "Llama2-34B": _llama(8192, 48, 64, 8, 22016, 32000),
    "Yi-34B": _llama(7168, 60, 56, 8, 20480, 64000),
    "yi-34b-chat": _llama(7168, 60, 56, 8, 20480, 64000),
    "yi-6b-chat": _llama(4096, 32, 32, 4, 11008, 64000),
    "Mistral-7B-v0.2": _llama(4096, 32, 32, 8, 14336, 32000, "mistral"),
    "openbuddy-zephyr-7b-chat": _llama(4096, 32, 32, 8, 14336, 36608, "mistral"),
    "qwen-1_8b-chat": _llama(2048, 24, 16, 16, 5504, 151936),
    "qwen-7b-chat": _llama(4096, 32, 32, 32, 11008, 151936),
    "qwen-14b-chat": _llama(5120, 40, 40, 40, 13696, 152064),
    "qwen-72b-chat": _llama(8192, 80, 64, 64, 24576, 152064),
    "baichuan2-7b-chat": _llama(4096, 32, 32, 32, 11008, 125696),
    "baichuan2-13b-chat": _llama(5120, 40, 40, 40, 13696, 125696),
    "Qwen2.5-32B": _llama(5120, 64, 40, 8, 27648, 152064, "qwen2"),
    "Qwen3-8B": {**_llama(4096, 36, 32, 8, 12288, 151936, "qwen3"), "head_dim": 128},
    "nanotron llama-1B": _llama(2048, 24, 32, 32, 4096, 49152),
    "phi-1.5 (1.3e9)": {
        "model_type": "phi",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
        "vocab_size": 51200,
    },
    "StableLM Alpha (3.6e9)": {
        "model_type": "gpt_neox",
        "hidden_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "intermediate_size": 16384,
        "vocab_size": 50688,
        "tie_word_embeddings": False,
    },
    "Falcon (41e9)": {
        "model_type": "falcon",
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "vocab_size": 65024,
        "new_decoder_architecture": True,
    },
    "MPT-125m": _gpt(768, 12, 12),
    "MPT-350m": _gpt(1024, 24, 16),
    "MPT-760m": _gpt(1536, 24, 12),
    "MPT-1b": _gpt(2048, 24, 16),
    "MPT-3b": _gpt(2560, 32, 20),
    "MPT-7b": _gpt(4096, 32, 32),
    "MPT-13b": _gpt(5120, 40, 40),
    "MPT-30b": _gpt(7168, 48, 56),
    "MPT-70b": _gpt(8192, 80, 64),
}


@cache
def shape_of(name: str) -> ModelShape:
    """The shape of a model as published tables call it; KeyError if we don't know it."""
    return read_shape(CONFIGS[name], name)


@cache
def gpt_shape(hidden: int, layers: int, heads: int, vocab: int) -> ModelShape:
    """A GPT as Megatron trains it."""
    name = f"GPT {hidden} x {layers}"
    return read_shape(_gpt(hidden, layers, heads, vocab), name)
