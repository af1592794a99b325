"""LoRA beside grouped experts: peft's wrappers of their weights hand over the two factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from shardtune.models.experts.grouped_experts import (
    Factors,
    GroupedExperts,
    LoraFactors,
    become,
    expert_matrices,
)


class FactoredParamWrapper(ParamWrapper):  # type: ignore[misc]
    """peft's adapters of one of the experts' weights. It hands the factors of those that are active
    to the experts, through the wrapper of the next weight, instead of a sum of weights and
    correction in the weights' place."""

    def forward(self, x: Tensor, *given: Any, factors: Factors | None = None) -> Tensor:
        chosen = [name for name in self.active_adapters if name in self.lora_A]
        factors = dict(factors or {})
        if chosen and not self.disable_adapters and not self.merged:
            factors[self.parameter_name] = sum_of([self._factors(name) for name in chosen])
        found: Tensor = self.base_layer(x, *given, factors=factors)
        return found

    def _factors(self, name: str) -> LoraFactors:
        """As peft lays them out: A by expert and rank, B by rank and expert."""
        lora_a, lora_b = self.lora_A[name].weight, self.lora_B[name].weight
        by_expert = lora_a.reshape(self.num_experts, -1, lora_a.shape[-1])
        outputs = lora_b.reshape(lora_b.shape[0], -1, self.num_experts).permute(2, 0, 1)
        return LoraFactors(by_expert, outputs, self.scaling[name])


# By this name peft knows the wrappers that it may add a further adapter to.
FactoredParamWrapper.__name__ = ParamWrapper.__name__


def sum_of(factors: Sequence[LoraFactors]) -> LoraFactors:
    """The corrections of several adapters as one whose rank is the sum of theirs:
    `s B A + s' B' A' = [s B, s' B'] [A; A']`."""
    if len(factors) == 1:
        return factors[0]
    lora_a = torch.cat([each.lora_a for each in factors], dim=1)
    lora_b = torch.cat([each.scale * each.lora_b for each in factors], dim=2)
    return LoraFactors(lora_a, lora_b, 1.0)


def hand_over_factors(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Changes peft's wrappers around frozen experts, and the experts with them where they are as
    transformers has them."""
    for module in model.modules():
        if not isinstance(module, ParamWrapper):
            continue
        experts = module.get_base_layer()
        names = expert_matrices(experts)
        if names and not any(getattr(experts, name).requires_grad for name in names):
            if not isinstance(experts, GroupedExperts):
                become(experts, GroupedExperts, compute_dtype)
            module.__class__ = FactoredParamWrapper
