"""Puts adapters into a model. They go in before anything is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardtune.errors import ModelError, Problem, did_you_mean
from shardtune.job import Adapter, LoRA, NoAdapter


def add_adapter(model: nn.Module, adapter: Adapter, *, seed: int) -> nn.Module:
    """The model with `adapter` in it: the adapter's weights are trained, in fp32, and no others."""
    if isinstance(adapter, NoAdapter):
        return model
    from peft import get_peft_model

    check_targets(model, adapter)
    # The first weights of an adapter are random: the same on each rank, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted: nn.Module = get_peft_model(model, _config(adapter))
    return adapted


def _config(adapter: LoRA) -> Any:
    from peft import LoraConfig, TaskType

    targets = adapter.targets if adapter.targets == "all-linear" else list(adapter.targets)
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
    )


def check_targets(model: nn.Module, adapter: Adapter) -> None:
    """Refuses names of layers that the model doesn't have."""
    if isinstance(adapter, NoAdapter) or adapter.targets == "all-linear":
        return
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, by another name

    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    problems = []
    for index, target in enumerate(adapter.targets):
        if target not in linear:
            near = did_you_mean(target, linear)
            fix = f"did you mean {near!r}?" if near else f"choose among {', '.join(sorted(linear))}"
            fact = f"the model has no linear layer {target!r}"
            problems.append(Problem(f"adapter.targets.{index}", fact, fix))
    if problems:
        raise ModelError(problems)
