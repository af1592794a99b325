"""Where a mixture of experts has its experts and its routers, as transformers builds them.

All experts of a layer are one module with a weight of three dimensions for each of their matrices;
the router stands beside it, under the same parent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_ROUTERS = ("gate", "router")


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold the experts of a layer, by name."""
    for name, module in model.named_modules():
        stacked = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        if stacked and isinstance(getattr(module, "num_experts", None), int):
            yield name, module


def expert_weights(model: nn.Module) -> list[str]:
    """The experts' weights by the last two parts of their names: `experts.gate_up_proj`."""
    found = {
        f"{name.rpartition('.')[2]}.{leaf}"
        for name, module in expert_modules(model)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }
    return sorted(found)


def router_names(model: nn.Module) -> set[str]:
    """Full names of the modules that choose among experts."""
    blocks = {name.rpartition(".")[0] for name, _ in expert_modules(model)}
    return {
        f"{block}.{child}".removeprefix(".")
        for block in blocks
        for child, _ in model.get_submodule(block).named_children()
        if child in _ROUTERS
    }


def modules_of_routers(model: nn.Module) -> set[nn.Module]:
    """The routers themselves, and what is inside: in some families (Gemma 4, HunYuan, Zaya) a
    linear layer gives the logits."""
    routers = map(model.get_submodule, router_names(model))
    return {module for router in routers for module in router.modules()}


def names_taken_by_peft(model: Any) -> frozenset[str]:
    """Module names that peft takes for a family's experts, because they were modules of these names
    once. Linear layers that bear one of them beside the experts (DeepSeek's shared experts) can't
    be adapted: peft would put the adapter on the experts instead, also whenever it loads it."""
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return frozenset(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, ()))
