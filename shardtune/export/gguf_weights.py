"""Weights of a Hugging Face model as llama.cpp lays them out: names, rotary order, norms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardtune.errors import Problem, RunError
from shardtune.export.gguf_hyperparameters import (
    gguf_family,
    head_dim,
    rope_parameters,
    rotary_dim,
)

ROPE_FREQS, FACTORS_LONG, FACTORS_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)


class GgufNames:
    """Names of a model's tensors in GGUF, by the table of the `gguf` package."""

    def __init__(self, config: Any) -> None:
        import gguf

        self._config = config
        architecture = gguf_family(config).architecture
        known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
        self._table = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)

    def of(self, name: str) -> str:
        """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
        found: str | None = self._table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            fact = f"GGUF has no place for {name} of a {self._config.model_type} model"
            raise RunError(Problem("--to gguf", fact, "export --to hf"))
        return found


def gguf_tensors(config: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file in fp32, one at a time."""
    family, names = gguf_family(config), GgufNames(config)
    yield from rotary_factors(config)
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # it is the embedding
        tensor = weight.detach().float()
        if family.pairs_interleaved and (heads := rotated_heads(config, name)):
            tensor = interleave_pairs(tensor, heads)
        if family.norm_offset and name.endswith("norm.weight"):
            tensor = tensor + family.norm_offset
        yield names.of(name), tensor


def rotated_heads(config: Any, name: str) -> int:
    """How many heads a query or key projection has; 0 for any other tensor."""
    module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if module == "q_proj":
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if module == "k_proj" else 0


def interleave_pairs(tensor: Tensor, heads: int) -> Tensor:
    """The rows of a projection in llama.cpp's rotary order.

    Hugging Face has a pair's members in the two halves of a head; llama.cpp, as the first Llama
    did, has them side by side. `models.gguf.undo_permutation` is the way back.
    """
    rows = tensor.shape[0]
    halves = tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rotary_factors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Divisors of the rotary frequencies, where a family scales each by itself."""
    rope = rope_parameters(config)
    match rope.get("rope_type"):
        case "llama3":
            yield ROPE_FREQS, _llama3_factors(config, rope)
        case "longrope":
            half = rotary_dim(config) // 2
            for name, key in ((FACTORS_LONG, "long_factor"), (FACTORS_SHORT, "short_factor")):
                factors = torch.tensor(rope[key], dtype=torch.float32)
                if len(factors) != half:
                    fact = f"{key} has {len(factors)} numbers for {half} rotary pairs"
                    raise RunError(Problem("--to gguf", fact, "correct the model's config.json"))
                yield name, factors


def _llama3_factors(config: Any, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's: short waves stay, long ones are stretched, and between them it is blended."""
    head = head_dim(config)
    places = torch.arange(0, head, 2, dtype=torch.float64) / head
    waves = 2 * math.pi * float(rope["rope_theta"]) ** places
    original = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return factors.float()
