"""Routers whose answers aren't logits, scores and chosen experts are refused by name; no loss takes
more forward passes than it needs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4ForCausalLM, Llama4TextConfig

from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.engine.router_losses import RouterLosses
from shardtune.errors import ModelError
from tests.models.families import config as family_config


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


def test_probabilities_are_refused() -> None:
    """Gemma 4's router answers with what softmax has made of its logits."""
    mixture = {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }
    model = AutoModelForCausalLM.from_config(family_config("gemma4_text", **mixture))
    RouterLosses(model, balance=0.0, z=0.1, device=torch.device("cpu"))
    with pytest.raises(ModelError, match="Gemma4TextRouter answers with probabilities") as caught:
        model(input_ids=torch.arange(3, 9)[None])
    assert caught.value.problems[0].place == "train.router_z_loss_coef"


@pytest.mark.parametrize(("aux", "passes"), [(0.1, 4), (0.0, 2)])
def test_only_load_balancing_needs_a_pass_before_the_others(aux: float, passes: int) -> None:
    model = AutoModelForCausalLM.from_config(family_config("mixtral"))
    called = []
    model.register_forward_pre_hook(lambda *given: called.append(1))
    schedule = Schedule("constant", 0.1, 0, 9)
    setup = EngineSetup(
        "fp32", OptimizerSetup("sgd"), schedule, None, 0,
        router_aux_loss_coef=aux, router_z_loss_coef=0.1,
    )  # fmt: skip
    ids = torch.arange(3, 11)[None]
    batch = MicroBatch(ids, torch.arange(8)[None], ids, (), 8, 8)
    NativeEngine(model, setup, World()).step([batch, batch])
    assert len(called) == passes
