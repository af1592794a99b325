"""The optimizer update: unscale, gradient clipping, the learning rate, the step itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardtune.engine.gradient_reduction import GradientReduction
from shardtune.engine.optim.build_optimizer import take_step


class OptimizerUpdate:
    """Clips the gradient by its norm and applies it. Under fp16 it keeps the loss scale."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        gradients: GradientReduction,
        max_grad_norm: float | None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradients = gradients
        self.max_grad_norm = max_grad_norm

    def apply(self, rate: float | Tensor) -> tuple[Tensor, Tensor]:
        """The gradient norm, and whether the update was applied: not if that isn't finite. All
        ranks see the same norm."""
        self.gradients.reduce()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.gradients.parameters.shards_bound():
            self.scaler.unscale_(self.optimizer)
            norm = self.gradients.norm()
            applied = take_step(self.optimizer, norm, self.max_grad_norm)
        self.scaler.update()
        return norm, applied

    def numbers(self) -> dict[str, float]:
        """The loss scale, where there is one."""
        if not self.scaler.is_enabled():
            return {}
        scaler = self.scaler.state_dict()
        return {"scale": scaler["scale"], "growth": float(scaler["_growth_tracker"])}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """The inverse of `numbers`."""
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            scaler |= {"scale": numbers["scale"], "_growth_tracker": int(numbers["growth"])}
            self.scaler.load_state_dict(scaler)
