"""Clipping and leaving out, which the optimizer does by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

from shardtune.config.job import IA3, Adapter, NoAdapter
from shardtune.core.setup import OptimizerSetup
from shardtune.engine.optim.build_optimizer import make_optimizer, take_step
from shardtune.models.peft_adapters import insert_adapters
from tests.models.families import config

RATE = 1e-2
RULES = {
    "adamw": OptimizerSetup("adamw", betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": OptimizerSetup("sgd", weight_decay=0.1),
    "momentum": OptimizerSetup("sgd", momentum=0.9),
}
LIMIT = 1.0
EXEMPT = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names that transformers' Trainer takes no weight decay for."""


def weights(device: str) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"matrix": (33, 20), "vector": (7,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=draw).to(device))
        for name, shape in shapes.items()
    }


def give(trained: dict[str, nn.Parameter], step: int, length: float) -> Tensor:
    """A gradient of some length, and its norm."""
    draw = torch.Generator().manual_seed(step)
    for weight in trained.values():
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight.device)
    norm = nn.utils.get_total_norm([w.grad for w in trained.values() if w.grad is not None])
    for weight in trained.values():
        assert weight.grad is not None
        weight.grad *= length / norm
    return torch.as_tensor(length, device=norm.device)


def reference(trained: dict[str, nn.Parameter], setup: OptimizerSetup) -> torch.optim.Optimizer:
    """torch's own, one tensor after the other."""
    groups: list[dict[str, Any]] = [
        {"params": [trained["matrix"]], "weight_decay": setup.weight_decay},
        {"params": [trained["vector"]], "weight_decay": 0.0},
    ]
    if setup.type == "sgd":
        return torch.optim.SGD(groups, lr=RATE, momentum=setup.momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=RATE, betas=setup.betas, eps=setup.eps, foreach=False)


def clipped_as_torch_does(rule: str, device: str) -> None:
    ours, theirs = weights(device), weights(device)
    optimizer, other = make_optimizer(ours, RULES[rule], RATE), reference(theirs, RULES[rule])
    for step, length in enumerate([50.0, 0.3, 1.0, 7.0]):  # longer and shorter than the limit
        assert take_step(optimizer, give(ours, step, length), LIMIT)
        give(theirs, step, length)
        nn.utils.clip_grad_norm_(theirs.values(), LIMIT)
        other.step()
        for name, weight in ours.items():
            torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6)


def left_out(rule: str, device: str) -> None:
    """Where a gradient is not finite nothing moves, from the very first step on."""
    ours, theirs = weights(device), weights(device)
    optimizer, other = (make_optimizer(each, RULES[rule], RATE) for each in (ours, theirs))
    for step, norm in enumerate([float("nan"), 2.0, float("inf"), 3.0]):
        before = {name: weight.detach().clone() for name, weight in ours.items()}
        length = give(ours, step, 2.0)
        finite = norm < float("inf")
        applied = take_step(optimizer, length if finite else length * norm, None)
        assert bool(applied) is finite
        if finite:
            take_step(other, give(theirs, step, 2.0), None)
        else:
            assert all(torch.equal(ours[name], old) for name, old in before.items())
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])
        one, two = optimizer.state[weight], other.state[theirs[name]]
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


VECTORS: dict[str, tuple[dict[str, Any], Adapter]] = {
    "llama": ({"attention_bias": True}, NoAdapter()),
    "cohere": ({"use_qk_norm": True}, NoAdapter()),  # norms with weights for each head
    "gpt_oss": ({}, NoAdapter()),  # biases of all experts in one
    "mistral": ({}, IA3()),  # factors with a dimension of one
}
"""Families by what of theirs is no matrix, some of it in two dimensions."""


@pytest.mark.parametrize("family", VECTORS)
def test_only_matrices_decay(family: str) -> None:
    """transformers' own Trainer leaves out norms and biases by their names; IA3 has nothing else
    that is trained, and its factors would be pulled from 1 to 0."""
    changes, adapter = VECTORS[family]
    model = AutoModelForCausalLM.from_config(config(family, **changes))
    adapted = insert_adapters(model, adapter)
    named = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    optimizer = make_optimizer(named, RULES["adamw"], RATE)
    groups = [set(group["params"]) for group in optimizer.param_groups if group["weight_decay"]]
    left = {name for name, each in named.items() if not any(each in group for group in groups)}
    expected = set(named) - set(get_parameter_names(model, [nn.LayerNorm], EXEMPT))
    expected |= {name for name in named if "ia3_l" in name or name.endswith("sinks")}
    assert left == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_long_gradient_is_clipped_as_torch_does_it(rule: str) -> None:
    clipped_as_torch_does(rule, "cpu")


@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_is_left_out_leaves_no_trace(rule: str) -> None:
    left_out(rule, "cpu")
