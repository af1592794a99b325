"""LoRA on the experts of a mixture: which of them, of what rank, and what stays frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.config.job import LoRA
from shardtune.core.model.active_experts import active_experts
from shardtune.errors import ModelError
from shardtune.models.expert_layers import expert_weights, router_names
from shardtune.models.materialize import decoder_layers
from shardtune.models.peft_adapters import check_module_names, insert_adapters
from shardtune.models.quantization.swap import quantizable
from tests.adapting import add_adapter
from tests.models.families import CONFIGS, config

MIXTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)


def empty(family: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(family, **changes))


def trained(model: Any) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_and_routers_are_found(family: str) -> None:
    model = empty(family)
    assert expert_weights(model) == ["experts.down_proj", "experts.gate_up_proj"]
    mixed = sum(".experts.gate_up_proj" in n and "bias" not in n for n in model.state_dict())
    assert len(router_names(model)) == mixed
    assert active_experts(model.config.to_dict()) == 2


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_adapted_and_the_router_is_not(family: str) -> None:
    names = trained(insert_adapters(empty(family), LoRA(rank=8)))
    experts = {name: shape for name, shape in names.items() if ".experts." in name}
    # Rank 8 over 2 active experts; 4 experts stand one below the other in A, side by side in B.
    assert {shape[0] for name, shape in experts.items() if "lora_A" in name} == {4 * 4}
    assert {shape[1] for name, shape in experts.items() if "lora_B" in name} == {4 * 4}
    others = {shape[0] for n, shape in names.items() if "lora_A" in n and n not in experts}
    assert others == {8}
    assert not any(".gate." in name or ".router." in name for name in names)


ROUTERS_WITH_LINEARS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text": (
        "router.proj",
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "hunyuan_v1_moe": ("gate.wg", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
}


@pytest.mark.parametrize("family", ROUTERS_WITH_LINEARS)
def test_linear_layers_of_a_router_are_neither_adapted_nor_quantized(family: str) -> None:
    wanted, fields = ROUTERS_WITH_LINEARS[family]
    shape = CONFIGS.get(family, CONFIGS["llama"]) | fields
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    linears = {name: each for name, each in model.named_modules() if name.endswith(wanted)}
    assert len(linears) == model.config.num_hidden_layers
    assert quantizable(decoder_layers(model), ()).isdisjoint(linears.values())
    names = trained(insert_adapters(model, LoRA(rank=8)))
    assert any(".experts." in name for name in names)
    assert not any(wanted in name for name in names)


def test_a_linear_layer_may_be_called_as_another_module_is() -> None:
    """Zamba 2 keeps its own adapters in sequences: the layers in them are called 0 and 1."""
    fields = {"layer_types": ["mamba", "hybrid", "mamba"], "mamba_headdim": 16, "adapter_rank": 4}
    with torch.device("meta"):
        shape = AutoConfig.for_model("zamba2", **CONFIGS["llama"] | fields)
        model = AutoModelForCausalLM.from_config(shape)
    names = trained(insert_adapters(model, LoRA(rank=2)))
    assert any("gate_up_proj_adapter_list.0.0.lora_A" in name for name in names)


@pytest.mark.parametrize(
    ("adapter", "rank"),
    [
        (LoRA(rank=8, experts="none"), 0),
        (LoRA(rank=8, targets=("q_proj",)), 0),
        (LoRA(rank=8, targets=("q_proj",), experts="all"), 4),
        (LoRA(rank=1), 1),
        (LoRA(rank=8, expert_rank=3), 3),
    ],
)
def test_what_a_job_says_of_experts(adapter: LoRA, rank: int) -> None:
    names = trained(insert_adapters(empty("mixtral"), adapter))
    ranks = {s[0] // 4 for name, s in names.items() if ".experts." in name and "lora_A" in name}
    assert ranks == ({rank} if rank else set())


@pytest.mark.parametrize(
    ("family", "router"),
    [
        ("mixtral", "gate"),
        ("gpt_oss", "router"),
        ("qwen2_moe", "gate"),  # has a `shared_expert_gate`, too, which is a target of LoRA
    ],
)
def test_a_router_is_trained_where_it_is_asked_for(family: str, router: str) -> None:
    names = trained(insert_adapters(empty(family), LoRA(rank=2, modules_to_save=(router,))))
    assert sum(f".{router}.modules_to_save." in name and "weight" in name for name in names) == 3


def test_names_that_peft_takes_for_experts_are_refused() -> None:
    with pytest.raises(ModelError, match="peft takes these names") as caught:
        check_module_names(empty("deepseek_v3"), LoRA(targets=("q_a_proj", "gate_proj")))
    assert "adapter.experts: all" in caught.value.problems[0].fix


def test_no_value_of_an_experts_adapter_is_left_to_chance() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one, other = (AutoModelForCausalLM.from_config(config("qwen3_moe")) for _ in range(2))
    first, second = (add_adapter(model, LoRA(rank=4), seed=3) for model in (one, other))
    values = dict(second.named_parameters())
    for name, value in first.named_parameters():
        if value.requires_grad:
            assert torch.equal(value, values[name])
            assert bool(value.any()) == ("lora_A" in name)
