"""Models that keep packed documents apart pass; models that don't are refused, not trained."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shardtune.errors import ModelError
from shardtune.models.packing_check import require_document_isolation

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def small(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64))
    if name == "qwen3":
        return Qwen3ForCausalLM(
            Qwen3Config(**SMALL, intermediate_size=64, num_key_value_heads=2, head_dim=8)
        )
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4))
    if name == "opt":
        return OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32))
    return BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_models_that_read_positions_pass(name: str, dtype: torch.dtype) -> None:
    require_document_isolation(small(name).to(dtype), rows=2)


@pytest.mark.parametrize("name", ["opt", "bloom"])
def test_models_that_do_not_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="doesn't keep packed documents apart") as caught:
        require_document_isolation(small(name), rows=2)
    assert caught.value.problems[0].fix == "set data.packing: false"


def test_answers_that_are_no_numbers_are_not_blamed_on_packing() -> None:
    model = small("llama")
    model.model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(ModelError, match="answers with NaN or infinity in fp32") as caught:
        require_document_isolation(model, rows=2)
    assert caught.value.problems[0].place == "train.precision"
