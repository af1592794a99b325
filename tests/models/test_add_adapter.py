"""Adapters: the same on every rank, only they are trained, and targets are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.world import World
from shardtune.errors import ModelError
from shardtune.models.load import load_base
from shardtune.models.model_files import ModelFiles
from tests.adapting import add_adapter
from tests.ranks import on_ranks
from tests.synthetic import load_model

TINY = ModelSection(name="tiny")


def adapted(adapter: Adapter, *, seed: int = 0) -> Any:
    return add_adapter(load_base(ModelFiles(TINY), "fp32"), adapter, seed=seed)


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def layers(model: Any) -> set[str]:
    """The names of the layers that have an adapter."""
    return {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained(model)}


def test_without_an_adapter_the_model_is_itself() -> None:
    model = load_base(ModelFiles(TINY), "fp32")
    assert add_adapter(model, NoAdapter(), seed=0) is model
    assert all(weight.requires_grad for weight in model.parameters())


def test_only_the_adapter_is_trained() -> None:
    model = adapted(LoRA(rank=4))
    assert all("lora_" in name for name in trained(model))
    # Each of 7 linear layers of 2 blocks has A and B; 4 x (in + out) weights, from tiny's sizes:
    # q, o: 64 + 64; k, v: 64 + 32; gate, up: 64 + 176; down: 176 + 64.
    assert len(trained(model)) == 2 * 7 * 2
    sizes = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 176)
    assert sum(weight.numel() for weight in trained(model).values()) == 2 * 4 * sizes


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers(adapted(LoRA(rank=2))) == expected
    assert layers(adapted(LoRA(rank=2, targets=("q_proj", "up_proj")))) == {"q_proj", "up_proj"}


def test_an_adapter_changes_nothing_at_first() -> None:
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        before = load_base(ModelFiles(TINY), "fp32")(input_ids=ids).logits
        after = adapted(LoRA(rank=4)).eval()(input_ids=ids).logits
    assert torch.equal(before, after)


def test_rank_alpha_and_dropout_arrive() -> None:
    model = adapted(LoRA(rank=4, alpha=12, dropout=0.25))
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert layer.lora_A["default"].weight.shape == (4, 64)
    assert layer.scaling["default"] == 3.0  # alpha / rank
    assert layer.lora_dropout["default"].p == 0.25


def test_the_seed_decides_and_nothing_else() -> None:
    first = adapted(LoRA(rank=4), seed=1)
    torch.rand(7)  # whatever was drawn before
    state = torch.get_rng_state()
    again, other = adapted(LoRA(rank=4), seed=1), adapted(LoRA(rank=4), seed=2)
    assert torch.equal(torch.get_rng_state(), state), "and nothing else is disturbed"
    for name, weight in trained(first).items():
        assert torch.equal(weight, trained(again)[name])
        assert torch.equal(weight, trained(other)[name]) is ("lora_B" in name)  # B starts at zero


def on_a_rank(world: World) -> dict[str, list[float]]:
    torch.manual_seed(1000 + world.rank)  # ranks may have drawn different numbers before
    model = load_model(TINY, LoRA(rank=2), TrainSection(precision="fp32", seed=3), device="cpu")
    return {name: weight.flatten().tolist() for name, weight in trained(model).items()}


def test_every_rank_has_the_same_adapter() -> None:
    one, other = on_ranks(2, on_a_rank)
    assert one == other
    assert any(any(values) for values in one.values())


def test_unknown_targets_are_refused_all_at_once_with_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        adapted(LoRA(targets=("q_porj", "v_proj", "nothing_like_it")))
    first, second = caught.value.problems
    assert first.place == "adapter.targets.0"
    assert first.fact == "the model has no linear layer 'q_porj'"
    assert first.fix == "did you mean 'q_proj'?"
    assert second.place == "adapter.targets.2"
    assert second.fix.startswith("choose among down_proj, gate_proj, k_proj, lm_head, ")


def test_a_layer_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ModelError, match="no linear layer 'embed_tokens'"):
        adapted(LoRA(targets=("embed_tokens",)))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft's word that it transposes for us
def test_gpt2_calls_its_linear_layers_conv1d() -> None:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    assert layers(add_adapter(model, LoRA(rank=2, targets=("c_attn",)), seed=0)) == {"c_attn"}
