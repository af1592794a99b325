"""Routing in fp32 where a family's own code does so, also under autocast.

DeepSeek and those after it cast a router's input and weight to fp32 before they multiply them:
small differences decide which experts a token meets. torch.autocast would round both to 16 bits
again, whatever the code says.
"""

from __future__ import annotations

import contextlib
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardtune.models.expert_layers import router_names


def route_in_fp32(model: nn.Module) -> None:
    """Keeps autocast out of routers that ask for fp32 themselves."""
    known: dict[type, bool] = {}
    for name in sorted(router_names(model)):
        router: Any = model.get_submodule(name)
        kind: type = type(router)
        if kind not in known:
            known[kind] = _multiplies_in_fp32(router)
        if known[kind]:
            router.__class__ = _without_autocast(kind)


@cache
def _without_autocast(kind: type) -> type:
    """A class, not a method of one module: a copy of a router (peft trains one) has to route with
    its own weights."""

    class Exact(kind):  # type: ignore[misc]
        def forward(self, hidden: Tensor, *given: Any, **named: Any) -> Any:
            with torch.autocast(hidden.device.type, enabled=False):
                return super().forward(hidden, *given, **named)

    Exact.__name__ = Exact.__qualname__ = kind.__name__
    return Exact


class _LinearInputs(TorchFunctionMode):
    """Sees what dtype is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _multiplies_in_fp32(router: nn.Module) -> bool:
    """Whether a router of 16-bit weights, given a 16-bit input, multiplies in fp32. Asked of a copy
    without memory; one that takes something else than hidden states is left as it is."""
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return False
    empty = deepcopy(router).to("meta", torch.bfloat16)
    seen = _LinearInputs()
    with contextlib.suppress(Exception), torch.no_grad(), seen:
        empty(torch.empty(4, weight.shape[-1], device="meta", dtype=torch.bfloat16))
    return seen.dtypes == {torch.float32}
