"""Attention of one token by groups of heads is transformers' own, up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardtune.kernels.decode_attention import (
    DECODE_ATTENTION,
    attending_by_groups,
    decode_attention,
)


@pytest.mark.parametrize("key_heads", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 3])
def test_it_is_that_of_transformers(key_heads: int, tokens: int) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups = 8 // key_heads
    query = torch.randn(3, 8, tokens, 16)
    key, value = torch.randn(3, key_heads, 20, 16), torch.randn(3, key_heads, 20, 16)
    seen = torch.arange(20) <= torch.tensor([4, 19, 11])[:, None]
    mask = torch.zeros(3, 20).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None, None]
    mask = mask.expand(-1, -1, tokens, -1)
    ours, _ = decode_attention(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert ours.shape == theirs.shape == (3, tokens, 8, 16)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_model_takes_it_for_a_while() -> None:
    config = LlamaConfig()
    config._attn_implementation = "sdpa"
    with attending_by_groups(config):
        assert config._attn_implementation == DECODE_ATTENTION
    assert config._attn_implementation == "sdpa"
