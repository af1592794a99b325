"""Routers that ask for fp32 get it under autocast; the others round as plain transformers does."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from shardtune.models.expert_layers import router_names
from shardtune.models.fp32_routing import route_in_fp32
from tests.models.families import config

IN_FP32 = {
    "deepseek_v2": True,
    "deepseek_v3": True,
    "glm4_moe": True,
    "gpt_oss": False,
    "granitemoe": False,
    "mixtral": False,
    "olmoe": False,
    "qwen3_moe": False,
}


def logits(router: nn.Module, hidden: Tensor) -> Tensor:
    found: Tensor = router(hidden)[0]
    return found.float()


@pytest.mark.parametrize("family", IN_FP32)
def test_autocast_is_kept_out_where_the_family_says_fp32(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family)).bfloat16()
    router = model.get_submodule(min(router_names(model)))
    nn.init.normal_(router.weight)
    hidden = torch.randn(5, 32).bfloat16()
    expected = logits(router, hidden)  # as transformers computes a model of 16 bits
    with torch.autocast("cpu", torch.bfloat16):
        rounded = logits(router, hidden)
        route_in_fp32(model)
        found = logits(router, hidden)
    assert torch.equal(found, expected)
    assert torch.equal(rounded, expected) != IN_FP32[family]


def test_a_copy_of_a_router_routes_with_its_own_weights() -> None:
    model = AutoModelForCausalLM.from_config(config("deepseek_v3"))
    route_in_fp32(model)
    router = model.get_submodule(min(router_names(model)))
    copy = deepcopy(router)  # as peft makes one that it trains
    nn.init.ones_(copy.weight)
    logits(copy, torch.randn(5, 32)).sum().backward()  # type: ignore[no-untyped-call]
    assert copy.weight.grad is not None
    assert router.weight.grad is None
