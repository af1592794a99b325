"""The update rule, and what it remembers of each weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.setup import OptimizerSetup
from shardtune.engines.eight_bit import adamw_8bit


def make_optimizer(
    trained: Mapping[str, nn.Parameter], setup: OptimizerSetup, rate: float
) -> torch.optim.Optimizer:
    """Weight decay pulls matrices to zero, never norms and biases: those have no surplus."""
    matrices = [p for p in trained.values() if _dims(p) >= 2]
    others = [p for p in trained.values() if _dims(p) < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": setup.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # A rank may have nothing to train: a stage of frozen layers still takes part in a step.
    groups = [group for group in groups if group["params"]] or groups[:1]
    if setup.type == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=setup.momentum)
    if setup.bits == 8:
        return adamw_8bit(groups, setup, rate)
    return torch.optim.AdamW(groups, lr=rate, betas=setup.betas, eps=setup.eps, fused=True)


def moment_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What an optimizer keeps for the weights: moments, not counters, nor a map that all share."""
    return [
        value
        for kept in optimizer.state.values()
        for key, value in kept.items()
        if isinstance(value, Tensor) and value.ndim > 0 and not key.startswith("qmap")
    ]


def _dims(parameter: nn.Parameter) -> int:
    """Dimensions of the whole weight; ZeRO-3 leaves an empty one in its place."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
