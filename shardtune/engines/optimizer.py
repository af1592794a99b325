"""The update rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardtune.core.setup import OptimizerSetup


def make_optimizer(
    trained: Mapping[str, nn.Parameter], setup: OptimizerSetup, rate: float
) -> torch.optim.Optimizer:
    """Weight decay pulls matrices to zero, never norms and biases: those have no surplus."""
    matrices = [p for p in trained.values() if _dims(p) >= 2]
    others = [p for p in trained.values() if _dims(p) < 2]
    groups = [
        {"params": matrices, "weight_decay": setup.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # A rank may have nothing to train: a stage of frozen layers still takes part in a step.
    groups = [group for group in groups if group["params"]] or groups[:1]
    if setup.type == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=setup.momentum)
    return torch.optim.AdamW(groups, lr=rate, betas=setup.betas, eps=setup.eps, fused=True)


def _dims(parameter: nn.Parameter) -> int:
    """Dimensions of the whole weight; ZeRO-3 leaves an empty one in its place."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
