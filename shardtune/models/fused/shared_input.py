"""Layers with one input, computed together by the module that holds them.

It does so before its own forward pass runs, and hands on the joint result in the place of the
input; each of the layers then only takes its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtune.core.fused_families import TURNED
from shardtune.kernels.rope import leave_turned

GATED = ("gate_proj", "up_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj")
JOINT = (ATTENTION, GATED)
"""Names of layers that have one input, where they are in one module."""


class Pieces(NamedTuple):
    """What layers with one input have made of it. It stands in the place of that input."""

    shape: tuple[int, ...]
    """Of the input."""
    parts: tuple[Tensor, ...]


def turns_at_once(module: Any, layers: Sequence[nn.Linear]) -> bool:
    """Whether queries and keys are turned by their positions with nothing in between."""
    between = ("q_norm", "k_norm", "qk_norm")
    return (
        module.config.model_type in TURNED
        and all(layer.bias is None for layer in layers)
        and not any(hasattr(module, name) for name in between)
        and leave_turned(type(module).__module__)
    )


def is_silu(mlp: Any) -> bool:
    from transformers.activations import SiLUActivation

    return isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


class Together:
    """A module with layers that have one input."""

    joint: tuple[str, ...]
    """Their names."""

    @property
    def layers(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.joint)


class Ahead(Together):
    """A module that computes them before its own forward pass."""

    turns = False
    """Whether queries and keys are turned by their positions here, and not later."""
    head_dim: int

    @property
    def is_ready(self) -> bool:
        """Whether it can."""
        raise NotImplementedError

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]) -> Any:
        """What the layers make of `x`, `[rows, length, width]`: by head, and turned."""
        raise NotImplementedError

    def product(self, hidden_states: Tensor) -> Tensor:
        """What they make of it, side by side, without their biases."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_ready:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        angles: Any = kwargs.get("position_embeddings") or (None, None)
        cos, sin = angles
        sizes = [layer.out_features for layer in self.layers]
        if self.turns and cos is not None and cos.shape[-1] == self.head_dim:
            heads = tuple(size // self.head_dim for size in sizes)
            parts = self.turned(as_computed(hidden_states), cos, sin, heads)
            kwargs["position_embeddings"] = (None, None)
        else:
            parts = torch.split(self.product(hidden_states), sizes, dim=-1)
        pieces = Pieces(tuple(hidden_states.shape), tuple(parts))
        return super().forward(pieces, *args, **kwargs)  # type: ignore[misc]


@cache
def with_way(way: type, kind: type) -> type:
    """`kind`, with another way to compute; by its own name, because transformers goes by names."""
    return type(kind.__name__, (way, kind), {"__module__": kind.__module__})


def by_token(x: Tensor) -> Tensor:
    """A row for each token, in the precision of the computation."""
    return as_computed(x.reshape(-1, x.shape[-1]))


def as_computed(x: Tensor) -> Tensor:
    """In the precision of the computation."""
    compute = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        compute = torch.get_autocast_dtype(x.device.type)
    return x.to(compute)
