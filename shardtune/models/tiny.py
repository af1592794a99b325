"""The built-in model `tiny`: a Llama of 109,120 random parameters that reads single bytes.

It exists so that a test or a first try needs no download. It knows nothing, but it has every part
of a real model: grouped-query attention, rotary positions, tied embeddings, special tokens, a chat
template. It is generated from a seed and is bitwise the same on every machine.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.core.model.tiny_config import TINY_CONFIG
from shardtune.models.hf_folder import cached_model, write_folder

if TYPE_CHECKING:
    from torch import Tensor

TINY_FOLDER = "tiny-v1"
"""A change of anything below needs a new number, or old caches would be taken for the new model."""

SEED = 20_240_229
SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, END = 256, 259  # ids: the 256 bytes come first, then the special tokens in their order

VOCABULARY: int = TINY_CONFIG["vocab_size"]
LAYERS: int = TINY_CONFIG["num_hidden_layers"]
HIDDEN: int = TINY_CONFIG["hidden_size"]
INNER: int = TINY_CONFIG["intermediate_size"]
HEADS: int = TINY_CONFIG["num_attention_heads"]
KEY_VALUE_HEADS: int = TINY_CONFIG["num_key_value_heads"]
POSITIONS: int = TINY_CONFIG["max_position_embeddings"]

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ('system', 'user', 'assistant') -%}
{{- raise_exception("the roles are system, user and assistant, not " ~ message['role']) -}}
{%- endif -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def make() -> Path:
    """The model's folder in the cache, written if it is missing."""
    return cached_model(
        TINY_FOLDER, lambda folder: write_folder(folder, config(), weights(), tokens())
    )


def config() -> Any:
    """The model's `LlamaConfig`."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        **{key: value for key, value in TINY_CONFIG.items() if key != "model_type"},
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        dtype="float32",
    )


def weights() -> dict[str, Tensor]:
    """Every tensor of the model in fp32, drawn from a generator of its own."""
    import torch

    generator = torch.Generator(device="cpu").manual_seed(SEED)

    def uniform(rows: int, columns: int, std: float) -> Tensor:
        # Not a normal distribution: its logarithms and cosines differ in the last bit between
        # processors. `rand` is a multiple of 2^-24 and one multiplication rounds alike everywhere.
        drawn = torch.rand(rows, columns, generator=generator, device="cpu", dtype=torch.float32)
        return (drawn - 0.5) * (std * math.sqrt(12))

    def linear(rows: int, columns: int) -> Tensor:
        # Keeps the size of what flows through, so that attention really mixes tokens: a test for
        # leaks between documents would see nothing in a model that hardly looks at its context.
        return uniform(rows, columns, std=1 / math.sqrt(columns))

    def ones() -> Tensor:
        return torch.ones(HIDDEN, device="cpu", dtype=torch.float32)

    narrow = HIDDEN * KEY_VALUE_HEADS // HEADS
    tensors = {"model.embed_tokens.weight": uniform(VOCABULARY, HIDDEN, std=0.02)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones(),
            f"{prefix}.self_attn.q_proj.weight": linear(HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": linear(narrow, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": linear(narrow, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": linear(HIDDEN, HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": ones(),
            f"{prefix}.mlp.gate_proj.weight": linear(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": linear(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": linear(HIDDEN, INNER),
        }
    tensors["model.norm.weight"] = ones()
    return tensors


def tokens() -> Any:
    """The tokenizer: a token for each byte, whose id is the byte, and the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL_TOKENS[PAD - 256],
        eos_token=SPECIAL_TOKENS[END - 256],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    A byte that is a visible Latin-1 character stands for itself; the others (controls, blanks and
    the soft hyphen) take the code points from 256 on, in their order.
    """
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    symbols = [chr(byte) for byte in range(256)]
    for offset, byte in enumerate(hidden):
        symbols[byte] = chr(256 + offset)
    return symbols
