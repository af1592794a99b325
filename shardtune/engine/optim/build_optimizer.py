"""The update rule, and what it remembers of each weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.setup import OptimizerSetup
from shardtune.engine.dtensor import local
from shardtune.engine.optim.adamw_8bit import adamw_8bit, is_8bit


def make_optimizer(
    trained: Mapping[str, nn.Parameter], setup: OptimizerSetup, rate: float
) -> torch.optim.Optimizer:
    """Weight decay pulls matrices to zero, never norms, biases and factors: those have no
    surplus."""
    matrices = [p for name, p in trained.items() if _is_matrix(name, p)]
    others = [p for name, p in trained.items() if not _is_matrix(name, p)]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": setup.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # A rank may have nothing to train: a stage of frozen layers still takes part in a step.
    groups = [group for group in groups if group["params"]] or groups[:1]
    if setup.type == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=setup.momentum, fused=True)
    if setup.bits == 8:
        return adamw_8bit(groups, setup, rate)
    return torch.optim.AdamW(groups, lr=rate, betas=setup.betas, eps=setup.eps, fused=True)


def take_step(optimizer: Any, norm: Tensor, limit: float | None) -> Tensor:
    """Clips the gradient, whose norm is given, to `limit` and applies it, unless it isn't finite.
    Returns whether it did.

    torch's fused optimizers read a divisor and a veto from tensors, where a loss scaler leaves
    them. So the GPU clips and decides, in its one pass over the gradients; nobody waits for it.
    """
    where = next((each.device for each in _parameters(optimizer)), norm.device)
    if norm.device != where:  # weights kept in CPU memory: torch would read before it is there
        norm = norm.to(where)
    applied = norm.isfinite()
    if is_8bit(optimizer):
        _wait_and_step(optimizer, norm, limit)
        return applied
    _begin_momentum(optimizer)
    optimizer.found_inf = (~applied).float()
    if limit is not None:
        optimizer.grad_scale = (norm / limit).clamp(min=1.0).float()
    optimizer.step()
    return applied


def _wait_and_step(optimizer: torch.optim.Optimizer, norm: Tensor, limit: float | None) -> None:
    """The same for bitsandbytes' optimizer, which knows nothing of such tensors."""
    length = float(norm)
    gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    if not math.isfinite(length):
        return
    if limit is not None and length > limit and gradients:
        torch._foreach_mul_(gradients, limit / length)
    optimizer.step()


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zeros where torch's fused SGD would make an uninitialised buffer, and leave it so if its very
    first step is vetoed."""
    for group in optimizer.param_groups:
        if group.get("momentum"):
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def future_moments(shares: Iterable[Tensor], setup: OptimizerSetup) -> list[Tensor]:
    """Room for what an optimizer will hold once it has taken a step; nothing is in it. What is
    host-mapped is there already, and not on the device."""
    if setup.host_mapped:
        return []
    count = 2 if setup.type == "adamw" else int(setup.momentum > 0)
    kind = torch.uint8 if setup.bits == 8 else torch.float32
    return [torch.empty_like(local(each), dtype=kind) for each in shares for _ in range(count)]


def moment_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What an optimizer keeps for the weights: moments, not counters, nor a map that all share."""
    return [
        value
        for kept in optimizer.state.values()
        for key, value in kept.items()
        if isinstance(value, Tensor) and value.ndim > 0 and not key.startswith("qmap")
    ]


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Some vectors are stored in two dimensions: biases of all experts of a layer, weights of norms
    by head (Cohere), IA3's factors. ZeRO-3 leaves an empty weight in the place of the whole."""
    *modules, leaf = name.split(".")
    vector = leaf.endswith("bias") or any(each.endswith(("norm", "ia3_l")) for each in modules)
    return not vector and len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
