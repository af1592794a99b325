"""Layers that share an input (Q, K, V; gate, up), computed together by the module that holds them.

The module computes them before its own forward runs, and hands on the outputs in the place of the
input; each of the layers then returns its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtune.compat.transformers_rope import skip_if_rotated
from shardtune.core.model.fused_families import ROPE_FAMILIES

GATE_UP = ("gate_proj", "up_proj")
QKV = ("q_proj", "k_proj", "v_proj")
SHARED_INPUT = (QKV, GATE_UP)
"""Names of layers that share an input, where they are in one module."""
MLP_FORWARD = [
    "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
    "return down_proj",
]
"""The forward of SwiGLU MLPs in transformers, which fused ones replace."""
STACKED_GATE_UP = ("gate_up_proj",)
"""One layer that is gate and up (Phi-3)."""
STACKED_MLP_FORWARD = [
    "up_states = self.gate_up_proj(hidden_states)",
    "gate, up_states = up_states.chunk(2, dim=-1)",
    "up_states = up_states * self.activation_fn(gate)",
    "return self.down_proj(up_states)",
]
"""The forward of MLPs with such a layer."""


class PrecomputedOutputs(NamedTuple):
    """Outputs of the layers that share an input, in the place of that input."""

    shape: tuple[int, ...]
    """Of the input."""
    parts: tuple[Tensor, ...]


def applies_rope_directly(module: Any, layers: Sequence[nn.Linear]) -> bool:
    """Whether RoPE follows the Q and K projections with nothing in between (no bias, no
    QK-norm)."""
    between = ("q_norm", "k_norm", "qk_norm")
    return (
        module.config.model_type in ROPE_FAMILIES
        and all(layer.bias is None for layer in layers)
        and not any(hasattr(module, name) for name in between)
        and bool(skip_if_rotated(type(module).__module__))
    )


def is_silu(mlp: Any) -> bool:
    from transformers.activations import SiLUActivation

    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    return isinstance(activation, nn.SiLU | SiLUActivation)


class SharedInputLayers:
    """A module with layers that share an input."""

    shared_input: tuple[str, ...]
    """Their names."""

    @property
    def layers(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.shared_input)


class SharedInput(SharedInputLayers):
    """A module that computes the layers with a shared input before its own forward."""

    fuses_rope = False
    """Whether RoPE is applied here, with the projections, and not in the module's own forward."""
    head_dim: int

    @property
    def is_ready(self) -> bool:
        """Whether it can compute them together now."""
        raise NotImplementedError

    def project_rope(self, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]) -> Any:
        """Q, K and V of `x`, `[rows, length, width]`, split by head, with RoPE."""
        raise NotImplementedError

    def project(self, hidden_states: Tensor) -> Tensor:
        """The layers' outputs, side by side, without biases."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_ready:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        angles: Any = kwargs.get("position_embeddings") or (None, None)
        cos, sin = angles
        sizes = [layer.out_features for layer in self.layers]
        if self.fuses_rope and cos is not None and cos.shape[-1] == self.head_dim:
            heads = tuple(size // self.head_dim for size in sizes)
            parts = self.project_rope(to_compute_dtype(hidden_states), cos, sin, heads)
            kwargs["position_embeddings"] = (None, None)
        else:
            parts = torch.split(self.project(hidden_states), sizes, dim=-1)
        pieces = PrecomputedOutputs(tuple(hidden_states.shape), tuple(parts))
        return super().forward(pieces, *args, **kwargs)  # type: ignore[misc]


@cache
def fused_class(way: type, kind: type) -> type:
    """A subclass of `kind` with the mixin `way` in front; by its own name, because transformers
    goes by class names."""
    return type(kind.__name__, (way, kind), {"__module__": kind.__module__})


def flatten_tokens(x: Tensor) -> Tensor:
    """A row for each token, in the compute dtype."""
    return to_compute_dtype(x.reshape(-1, x.shape[-1]))


def to_compute_dtype(x: Tensor) -> Tensor:
    """In the compute dtype: autocast's, where it is on."""
    compute = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        compute = torch.get_autocast_dtype(x.device.type)
    return x.to(compute)
