"""Lets peft's LoRA layers compute through `products`, and those with one input together.

The layers stay peft's, with their names and weights: only their class changes to one that knows a
shorter way. A module that holds layers with one input (attention: queries, keys, values; MLP: gate
and up) computes them before its own forward pass runs, and hands on the joint result in the place
of the input. Each of the layers then only takes its part. What goes back meets in one matrix, which
for queries, keys and values is a kernel's work (`rotary`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from shardtune.models.adapters import NAME
from shardtune.models.fp8 import FP8Linear, JointFP8
from shardtune.models.products import Adapted, Closing, Opening
from shardtune.models.quantise import QuantisedLinear
from shardtune.models.rotary import Turned, leave_turned

GATED = ("gate_proj", "up_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj")
JOINT = (ATTENTION, GATED)
"""Names of layers that have one input, where they are in one module."""
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite", "olmo2"})
"""Families whose attention and MLP use their input for these layers and its shape alone."""
TURNED = frozenset({"llama", "mistral", "gemma", "granite"})
"""Those whose every attention turns halves of whole heads."""


def quicken(part: nn.Module, family: str) -> None:
    """Gives the plain LoRA layers in `part` the shorter way; others are left as they are."""
    for module in part.modules():
        if type(module) is Linear and _is_plain(module):
            module.__class__ = AdaptedLinear
    if family in FAMILIES:
        for module in list(part.modules()):
            for names in JOINT:
                _join(module, names)


def _is_plain(layer: Any) -> bool:
    base = layer.base_layer
    return (
        list(layer.active_adapters) == [NAME]
        and list(layer.lora_A) == [NAME]
        and not layer.lora_variant
        and isinstance(layer.lora_dropout[NAME], nn.Identity)
        and layer.lora_B[NAME].bias is None
        and not layer.fan_in_fan_out
        and isinstance(base, nn.Linear)
        and (type(base) is nn.Linear or isinstance(base, QuantisedLinear))
        and not base.weight.requires_grad
    )


def _join(module: Any, names: tuple[str, ...]) -> None:
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(layer, AdaptedLinear) for layer in layers):
        return
    for place, layer in enumerate(layers):
        layer.place = place
    closes = names == GATED and _is_gated(module)
    kind: Any = type(module)
    module.__class__ = _with(GatedMLP if closes else Joining, kind)
    module.joint = names
    if names == ATTENTION:
        module.turns = _turns_at_once(module, layers)
    bases = [layer.base_layer for layer in layers]
    if all(isinstance(base, FP8Linear) for base in bases):
        module.add_module("joint_weights", JointFP8(bases))


def _turns_at_once(module: Any, layers: list[Any]) -> bool:
    """Whether queries and keys are turned by their positions with nothing in between."""
    between = ("q_norm", "k_norm", "qk_norm")
    return (
        module.config.model_type in TURNED
        and all(layer.base_layer.bias is None for layer in layers)
        and not any(hasattr(module, name) for name in between)
        and leave_turned(type(module).__module__)
    )


def _is_gated(module: Any) -> bool:
    """Whether an MLP is `down_proj(silu(gate_proj(x)) * up_proj(x))`, without biases."""
    last: Any = getattr(module, "down_proj", None)
    layers = (module.gate_proj, module.up_proj, last)
    return (
        isinstance(last, AdaptedLinear)
        and isinstance(module.act_fn, nn.SiLU | SiLUActivation)
        and all(layer.base_layer.bias is None for layer in layers)
        and len({layer.r[NAME] for layer in layers[:2]}) == 1
    )


class Pieces(NamedTuple):
    """What layers with one input have made of it. It stands in the place of that input."""

    shape: tuple[int, ...]
    """Of the input."""
    parts: tuple[Tensor, ...]


class AdaptedLinear(Linear):  # type: ignore[misc]
    """A LoRA layer of peft that computes at once, or takes its part of what was joined."""

    place = 0
    """Among the layers that have its input."""

    @property
    def adapting(self) -> bool:
        return not self.disable_adapters and not self.merged

    def forward(self, x: Tensor | Pieces, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, Pieces):
            y = x.parts[self.place]
        elif self.adapting:
            y = product(x, (self,))
        else:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        bias = self.base_layer.bias
        return y if bias is None else y + bias.to(y.dtype)


class Joining:
    """A module whose layers with one input are computed together."""

    joint: tuple[str, ...]
    turns = False
    """Whether what it makes is turned by its positions here, and not later."""
    head_dim: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = tuple(getattr(self, name) for name in self.joint)
        if not _all_adapting(layers):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        y = product(hidden_states, layers)
        cos, sin = kwargs.get("position_embeddings") or (None, None)
        if self.turns and cos is not None and cos.shape[-1] == self.head_dim:
            heads = tuple(layer.out_features // self.head_dim for layer in layers)
            parts = Turned.apply(y, cos, sin, heads)  # type: ignore[no-untyped-call]
            kwargs["position_embeddings"] = (None, None)
        else:
            parts = torch.split(y, [layer.out_features for layer in layers], dim=-1)
        pieces = Pieces(tuple(hidden_states.shape), tuple(parts))
        return super().forward(pieces, *args, **kwargs)  # type: ignore[misc]


class GatedMLP:
    """An MLP with adapters on all its layers, whose activation is computed with them."""

    gate_proj: AdaptedLinear
    up_proj: AdaptedLinear
    down_proj: AdaptedLinear

    def forward(self, hidden_states: Tensor) -> Any:
        first, last = (self.gate_proj, self.up_proj), self.down_proj
        if not _all_adapting((*first, last)):
            return super().forward(hidden_states)  # type: ignore[misc]
        flat, (downs, ups) = _flat(hidden_states), _pairs(first)
        opened = Opening.apply(  # type: ignore[no-untyped-call]
            flat, torch.cat(downs), _frozen(first)
        )
        closed = Closing.apply(  # type: ignore[no-untyped-call]
            *opened, torch.cat(ups), *_matrices((last,)), _frozen((last,))
        )
        return closed.view(*hidden_states.shape[:-1], closed.shape[-1])


def _all_adapting(layers: tuple[nn.Module, ...]) -> bool:
    """False too where peft has taken an adapter out: its layer is an ordinary one again."""
    return all(isinstance(layer, AdaptedLinear) and layer.adapting for layer in layers)


@cache
def _with(way: type, kind: type) -> type:
    """`kind`, with another way to compute; by its own name, because transformers goes by names."""
    return type(kind.__name__, (way, kind), {"__module__": kind.__module__})


def product(x: Tensor, layers: tuple[AdaptedLinear, ...]) -> Tensor:
    """What `layers` make of their common input, side by side, without their biases."""
    y: Tensor = Adapted.apply(  # type: ignore[no-untyped-call]
        _flat(x), *_matrices(layers), _frozen(layers)
    )
    return y.view(*x.shape[:-1], y.shape[-1])


def _flat(x: Tensor) -> Tensor:
    """A row for each token, in the precision of the computation."""
    compute = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        compute = torch.get_autocast_dtype(x.device.type)
    return x.reshape(-1, x.shape[-1]).to(compute)


def _matrices(layers: tuple[AdaptedLinear, ...]) -> tuple[Tensor, Tensor]:
    """LoRA's matrices as those of one layer, in which none sees what another's have made."""
    downs, ups = _pairs(layers)
    if len(layers) == 1:
        return downs[0], ups[0]
    return torch.cat(downs), torch.block_diag(*ups)  # type: ignore[no-untyped-call]


def _pairs(layers: tuple[AdaptedLinear, ...]) -> tuple[list[Tensor], list[Tensor]]:
    downs = [layer.lora_A[NAME].weight for layer in layers]
    return downs, [layer.lora_B[NAME].weight * layer.scaling[NAME] for layer in layers]


def _frozen(layers: tuple[AdaptedLinear, ...]) -> tuple[nn.Linear, ...]:
    return tuple(layer.base_layer for layer in layers)
