"""LoRA of experts in peft's and in vLLM's layout: each expert gets what was trained for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from shardtune.config.job import LoRA
from shardtune.errors import RunError
from shardtune.export import expert_layouts as layouts
from shardtune.export.vllm_export import export_vllm
from tests.adapting import add_adapter
from tests.export.tuned import finished
from tests.models.families import config

EXPERTS = 4
FAMILIES = ("deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
Adapter = tuple[dict[str, Tensor], dict[str, Any]]

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not")


def base(family: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(config(family))


def trained(family: str, **settings: Any) -> Any:
    """A model whose adapters have values, none of which is like another."""
    model: Any = add_adapter(base(family), LoRA(rank=8, **settings), seed=0)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw))
    return model


def adapter(model: Any) -> Adapter:
    """What is saved of it, in peft's layout."""
    tensors = {name: each.contiguous() for name, each in get_peft_model_state_dict(model).items()}
    return tensors, model.peft_config["default"].to_dict()


def computed(model: Any, family: str) -> layouts.Deltas:
    """What peft itself adds to each expert of a model in memory."""
    found: layouts.Deltas = {}
    for name, wrapper in model.named_modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        layer = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        left, right, scaling = wrapper.get_delta_factors("default")
        if not wrapper._did_swap_in_out_features:  # stored as inputs by outputs
            left, right = right.transpose(1, 2), left.transpose(1, 2)
        for expert in range(EXPERTS):
            delta = layouts._dense(right[expert].detach(), left[expert].detach() * scaling)
            for matrix, part in layouts._halves(family, wrapper.parameter_name, len(delta)):
                found[layer, expert, matrix] = delta[part]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_give_each_expert_what_was_trained(family: str, tmp_path: Path) -> None:
    model = trained(family)
    expected = computed(model, family)
    tensors, settings = adapter(model)
    found = layouts.peft_deltas(tensors, settings, EXPERTS, family)
    mixed = 2 if family == "deepseek_v3" else 3
    assert layouts.require_same_deltas(expected, found) == mixed * EXPERTS * 3
    served = layouts.vllm_tensors(tensors, settings, EXPERTS, family)
    told = layouts.vllm_settings(settings, family)
    layouts.require_same_deltas(expected, layouts.vllm_deltas(served, told, EXPERTS, family))
    # Whoever loads the result with peft computes the same.
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(family), tmp_path)
    layouts.require_same_deltas(expected, computed(loaded, family))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "base_model.model.model.layers.2.mlp.experts.3.gate_proj.lora_A.weight"),
        ("mixtral", "base_model.model.model.layers.0.block_sparse_moe.experts.0.w3.lora_B.weight"),
        ("gpt_oss", "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"),
        (
            "granitemoe",
            "base_model.model.model.layers.1.block_sparse_moe.experts.1.down_proj.lora_B.weight",
        ),
    ],
)
def test_names_are_those_that_vllm_looks_for(family: str, name: str) -> None:
    assert name in layouts.vllm_tensors(*adapter(trained(family)), EXPERTS, family)


def test_attention_stays_as_it_is() -> None:
    tensors, settings = adapter(trained("qwen3_moe"))
    served = layouts.vllm_tensors(tensors, settings, EXPERTS, "qwen3_moe")
    others = [name for name in tensors if ".experts." not in name]
    assert others
    assert all(torch.equal(served[name], tensors[name]) for name in others)
    told = layouts.vllm_settings(settings, "qwen3_moe")
    assert told["r"] == 8
    assert "rank_pattern" not in told


def swapped_experts(served: dict[str, Tensor]) -> None:
    one, other = (f"base_model.model.model.layers.0.mlp.experts.{n}.up_proj" for n in (0, 1))
    for side in ("A", "B"):
        first, second = (f"{name}.lora_{side}.weight" for name in (one, other))
        served[first], served[second] = served[second], served[first]


def swapped_halves(served: dict[str, Tensor]) -> None:
    place = "base_model.model.model.layers.1.mlp.experts.2"
    first, second = (f"{place}.{name}.lora_B.weight" for name in ("gate_proj", "up_proj"))
    served[first], served[second] = served[second], served[first]


def unscaled(served: dict[str, Tensor]) -> None:
    name = "base_model.model.model.layers.1.mlp.experts.2.down_proj.lora_B.weight"
    served[name] = served[name] / 4


def missing(served: dict[str, Tensor]) -> None:
    for side in ("A", "B"):
        del served[f"base_model.model.model.layers.1.mlp.experts.2.down_proj.lora_{side}.weight"]


@pytest.mark.parametrize("damage", [swapped_experts, swapped_halves, unscaled, missing])
def test_a_wrong_order_is_refused(damage: Any) -> None:
    tensors, settings = adapter(trained("qwen3_moe"))
    expected = layouts.peft_deltas(tensors, settings, EXPERTS, "qwen3_moe")
    served = layouts.vllm_tensors(tensors, settings, EXPERTS, "qwen3_moe")
    damage(served)
    told = layouts.vllm_settings(settings, "qwen3_moe")
    with pytest.raises(RunError, match="read back"):
        layouts.require_same_deltas(
            expected, layouts.vllm_deltas(served, told, EXPERTS, "qwen3_moe")
        )


def test_experts_side_by_side_in_the_wrong_way_are_refused() -> None:
    """Columns of B by expert and then by rank, as A has its rows: what others get wrong."""
    tensors, settings = adapter(trained("gpt_oss"))
    expected = layouts.peft_deltas(tensors, settings, EXPERTS, "gpt_oss")
    served = layouts.vllm_tensors(tensors, settings, EXPERTS, "gpt_oss")
    name = next(each for each in served if each.endswith(".experts.lora_B.weight"))
    rank = served[name].shape[1] // EXPERTS
    columns = served[name].reshape(-1, rank, EXPERTS)
    served[name] = columns.transpose(1, 2).flatten(1).contiguous()
    told = layouts.vllm_settings(settings, "gpt_oss")
    with pytest.raises(RunError, match="another down matrix"):
        layouts.require_same_deltas(expected, layouts.vllm_deltas(served, told, EXPERTS, "gpt_oss"))


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("qwen3_moe", {"expert_rank": 3}, "power of two"),
        ("qwen3_moe", {"variant": "rslora"}, "rslora"),
        ("qwen3_next", {}, "isn't known here"),
    ],
)
def test_what_vllm_would_read_otherwise_is_refused(
    family: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(RunError, match=told):
        layouts.vllm_tensors(*adapter(trained(family, **settings)), EXPERTS, family)


def test_an_adapter_of_another_number_of_experts_is_refused() -> None:
    with pytest.raises(RunError, match="can't be told apart"):
        layouts.read_peft(*adapter(trained("mixtral")), experts=8)


@pytest.mark.slow
def test_a_run_with_experts_is_exported(tmp_path: Path) -> None:
    source = finished(tmp_path, "qwen3_moe", LoRA(rank=8))
    found = export_vllm(source, tmp_path / "out")
    assert found.adapter
    assert "--max-lora-rank 8" in found.command
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight" in names
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert {"gate_proj", "up_proj", "down_proj", "q_proj"} <= set(told["target_modules"])
