"""A GGUF file of a few kilobytes that has every part of SmolLM2's, and the model in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


@dataclass(frozen=True)
class SmallGGUF:
    """The file, and the Hugging Face model whose weights were written to it."""

    path: Path
    model: Any


def llama_cpp_order(weight: Any, heads: int) -> Any:
    """llama.cpp's order of a projection's rows, from its description: row i of a head's first
    half and row i of its second half become neighbours."""
    rows = weight.shape[0] // heads
    order = [
        head * rows + member * (rows // 2) + pair
        for head in range(heads)
        for pair in range(rows // 2)
        for member in range(2)
    ]
    return weight[order]


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> SmallGGUF:
    gguf = pytest.importorskip("gguf", reason="needs the extra `demo`")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = [*SPECIAL, *sorted(_byte_letters()), "Ġ1", "Ġa", "ab", "12"]
    config = LlamaConfig(
        vocab_size=len(words),
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)

    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(words))
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_token_list(words)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(words) - len(SPECIAL)))
    writer.add_token_merges(["Ġ 1", "Ġ a", "a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied: it is the embedding
            continue
        array = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            array = llama_cpp_order(array, 4 if "q_proj" in name else 2)
        quantized = "up_proj" in name
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_llama_cpp_name(name), gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return SmallGGUF(path, model)


def _byte_letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def _llama_cpp_name(name: str) -> str:
    """From the names that llama.cpp's own `gguf` package keeps for this architecture."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    found = names.get_name(name, try_suffixes=(".weight",))
    assert found is not None, name
    return str(found)
