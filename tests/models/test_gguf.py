"""A small GGUF file gives back the model that was written to it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from shardtune.errors import ModelError
from shardtune.models.gguf import (
    open_gguf,
    read_config,
    read_tensors,
    read_tokenizer,
    require_gguf,
    undo_permutation,
)


def test_the_rows_of_a_head_go_back_to_their_halves() -> None:
    # Two heads of six rows, written as llama.cpp has them: pairs (0, 3), (1, 4), (2, 5).
    stored = torch.tensor([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]).reshape(12, 1)
    assert undo_permutation(stored, heads=2).flatten().tolist() == list(range(12))


def test_the_tensors_are_those_that_were_written(small_gguf: Any) -> None:
    reader = open_gguf(small_gguf.path)
    counted: list[int] = []
    tensors = read_tensors(reader, counted.append)
    assert len(counted) == len(reader.tensors) == 20
    expected = {k: v for k, v in small_gguf.model.state_dict().items() if k != "lm_head.weight"}
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        # Q8_0 rounds to 127 steps of a block's largest value, which is below 0.1 here.
        tolerance = 5e-4 if "up_proj" in name else 0
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=tolerance)


def test_the_model_computes_the_same(small_gguf: Any) -> None:
    reader = open_gguf(small_gguf.path)
    tensors = read_tensors(reader, lambda _: None)
    model = LlamaForCausalLM(read_config(reader)).float()
    model.load_state_dict(tensors, strict=False)
    reference = LlamaForCausalLM(small_gguf.model.config).float()
    reference.load_state_dict(small_gguf.model.state_dict())
    # What was quantized can't come back exactly; with it taken over, all the rest must.
    quantized = {name: tensor for name, tensor in tensors.items() if "up_proj" in name}
    reference.load_state_dict(quantized, strict=False)
    ids = torch.arange(3, 103).reshape(2, 50)
    with torch.no_grad():
        found, expected = model(ids).logits, reference(ids).logits
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_config_is_that_of_the_model(small_gguf: Any) -> None:
    found = read_config(open_gguf(small_gguf.path))
    expected = small_gguf.model.config
    for key in (
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ):
        assert getattr(found, key) == getattr(expected, key), key


def test_the_tokenizer_takes_digits_one_by_one(small_gguf: Any) -> None:
    tokenizer = read_tokenizer(open_gguf(small_gguf.path))
    assert tokenizer.tokenize(" a 12ab") == ["Ġa", "Ġ", "1", "2", "ab"]
    assert tokenizer.decode(tokenizer.encode(" a 12ab\né🙂")) == " a 12ab\né🙂"


def test_the_tokenizer_knows_its_special_tokens_and_its_template(small_gguf: Any) -> None:
    tokenizer = read_tokenizer(open_gguf(small_gguf.path))
    assert tokenizer.encode("<|im_start|>ab<|im_end|>")[0::2] == [1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert tokenizer.model_max_length == 128
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user hi<|im_end|>"


def test_a_missing_gguf_package_is_said_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'shardtune\[demo\]'"):
        require_gguf()
