"""Routers whose answers aren't logits, scores and chosen experts are refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from shardtune.engine.router_losses import RouterLosses
from shardtune.errors import ModelError


def test_logits_in_another_place_are_refused() -> None:
    config = Llama4TextConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        pad_token_id=0,
    )
    model = Llama4ForCausalLM(config)
    with pytest.raises(ModelError, match="logits first"):
        RouterLosses(model, balance=0.0, z=0.1, device=torch.device("cpu"))
