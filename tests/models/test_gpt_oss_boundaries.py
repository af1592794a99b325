"""gpt-oss by boundaries, sinks included, gives what each of its documents gives alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from shardtune.core.model.document_boundaries import (
    VARLEN_SINKS,
    attention_inputs,
    takes_boundaries,
)
from shardtune.models.packed_attention import register, why_unsuited

LENGTHS = (5, 7, 4)
IDS = (torch.arange(sum(LENGTHS)) * 7 % 97 + 3)[None]


def gpt_oss() -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name or "bias" in name:
            torch.nn.init.normal_(parameter)
    return model


def answer(model: Any, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits.square().sum().backward()  # type: ignore[no-untyped-call]
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_packed_it_is_what_documents_are_alone() -> None:
    model = gpt_oss()
    alone = [model(input_ids=each, use_cache=False).logits for each in IDS.split(LENGTHS, dim=1)]
    expected = torch.cat(alone, dim=1)
    right = answer(model, expected)
    assert why_unsuited(model) is None
    register()
    model.set_attn_implementation(VARLEN_SINKS)
    assert takes_boundaries(model)
    positions = torch.cat([torch.arange(each) for each in LENGTHS])[None]
    told = attention_inputs(model, positions, "cpu")
    found = model(input_ids=IDS, position_ids=positions, use_cache=False, **told).logits
    assert torch.allclose(found, expected, atol=1e-5)
    for name, gradient in answer(model, found).items():
        assert torch.allclose(gradient, right[name], rtol=1e-4, atol=1e-4), name


def test_whoever_tells_nothing_gets_the_familys_own() -> None:
    model = gpt_oss()
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        register()
        model.set_attn_implementation(VARLEN_SINKS)
        found = model(input_ids=IDS, use_cache=False).logits
    assert torch.equal(found, expected)
