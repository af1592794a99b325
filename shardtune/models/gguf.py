"""A Llama model in llama.cpp's GGUF format, read as what Hugging Face calls the same things.

Written for SmolLM2: its tokenizer takes digits one by one, which a GGUF header states only by the
word `smollm`. The `gguf` package reads the file and knows the quantized formats.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.errors import ModelError, Problem

if TYPE_CHECKING:
    from torch import Tensor

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3  # the header's type of a special token


def require_gguf() -> None:
    """Refuse before anything is downloaded if the package that reads GGUF is missing."""
    if importlib.util.find_spec("gguf") is None:
        fact = "this Python package, which dequantizes the model, is not installed"
        raise ModelError(Problem("gguf", fact, "pip install 'shardtune[demo]'"))


def open_gguf(path: Path) -> Any:
    """A `GGUFReader`; the tensors stay on disk until one is asked for."""
    from gguf import GGUFReader

    return GGUFReader(path)


def read_config(reader: Any) -> Any:
    """The `LlamaConfig` that the header describes; the output head is the embedding."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_value(reader, "llama.vocab_size"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        hidden_size=_value(reader, "llama.embedding_length"),
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_attention_heads=_value(reader, "llama.attention.head_count"),
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_value(reader, "llama.context_length"),
        # The header holds a float32 of it; six digits give back what the authors wrote, 1e-5.
        rms_norm_eps=float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _value(reader, "llama.rope.freq_base"),
        },
        tie_word_embeddings=True,
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
        dtype="bfloat16",
    )


def read_tensors(reader: Any, advance: Callable[[int], None]) -> dict[str, Tensor]:
    """Every tensor in bf16 under its Hugging Face name; `advance(1)` is called after each."""
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": _value(reader, "llama.attention.head_count"),
        "attn_k": _value(reader, "llama.attention.head_count_kv"),
    }
    tensors = {}
    for stored in reader.tensors:
        # One tensor at a time in fp32: only the bf16 results add up in memory.
        tensor = torch.tensor(dequantize(stored.data, stored.tensor_type)).to(torch.bfloat16)
        name, kind = _hugging_face_name(stored.name)
        tensors[name] = undo_permutation(tensor, heads[kind]) if kind in heads else tensor
        advance(1)
    return tensors


def undo_permutation(tensor: Tensor, heads: int) -> Tensor:
    """The rows of a query or key projection in Hugging Face's order.

    A rotary pair is two neighbouring rows of a head in llama.cpp, but row i of the first half and
    row i of the second half in Hugging Face's model, so each head's (pair, member) becomes
    (member, pair).
    """
    rows, columns = tensor.shape
    pairs = tensor.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_tokenizer(reader: Any) -> Any:
    """The tokenizer rebuilt from the header, with the model's own chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: list[str] = _value(reader, "tokenizer.ggml.tokens")
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges: list[str] = _value(reader, "tokenizer.ggml.merges")
    vocabulary = {word: index for index, word in enumerate(words)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    # Digits first: else ` 12` would keep its blank with the first digit and get other ids than
    # the model was trained on.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(word, special=True, normalized=False)
            for word, kind in zip(words, types, strict=True)
            if kind == CONTROL
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=words[_value(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=words[_value(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=words[_value(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=words[_value(reader, "tokenizer.ggml.padding_token_id")],
        chat_template=_value(reader, "tokenizer.chat_template"),
        model_max_length=_value(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _hugging_face_name(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`)."""
    match name.split("."):
        case ["blk", layer, kind, "weight"]:
            return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight", kind
        case [kind, "weight"]:
            return f"{TOP_NAMES[kind]}.weight", kind
    raise ValueError(f"{name} is no tensor of a Llama model")
