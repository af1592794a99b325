"""Lets peft's LoRA layers compute through `products`, and those with one input together.

The layers stay peft's, with their names and weights: only their class changes to one that knows a
shorter way. A module that holds layers with one input (attention: queries, keys, values; MLP: gate
and up) computes them before its own forward pass runs, and hands on the joint result in the place
of the input. Each of the layers then only takes its columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from shardtune.models.adapters import NAME
from shardtune.models.fp8 import FP8Linear, JointFP8
from shardtune.models.products import Adapted, Closing, Opening
from shardtune.models.quantise import QuantisedLinear

GATED = ("gate_proj", "up_proj")
JOINT = (("q_proj", "k_proj", "v_proj"), GATED)
"""Names of layers that have one input, where they are in one module."""
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite", "olmo2"})
"""Families whose attention and MLP use their input for these layers and its shape alone."""


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
    begin, width = 0, sum(layer.out_features for layer in layers)
    if width == layers[0].in_features:  # what comes in couldn't be told from what was joined
        return
    for layer in layers:
        layer.begin = begin
        layer.joint = width
        begin += layer.out_features
    closes = names == GATED and _is_gated(module)
    kind: Any = type(module)
    module.__class__ = _with(GatedMLP if closes else Joining, kind)
    module.joint = names
    bases = [layer.base_layer for layer in layers]
    if all(isinstance(base, FP8Linear) for base in bases):
        module.add_module("joint_weights", JointFP8(bases))


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


class AdaptedLinear(Linear):  # type: ignore[misc]
    """A LoRA layer of peft that computes at once, or takes its columns of what was joined."""

    begin = 0
    joint = 0
    """Columns of the joint result; 0 where there is none."""

    @property
    def adapting(self) -> bool:
        return not self.disable_adapters and not self.merged

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.adapting:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        if x.shape[-1] == self.joint:
            y = x[..., self.begin : self.begin + self.out_features]
        else:
            y = product(x, (self,))
        bias = self.base_layer.bias
        return y if bias is None else y + bias.to(y.dtype)


class Joining:
    """A module whose layers with one input are computed together."""

    joint: tuple[str, ...]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = tuple(getattr(self, name) for name in self.joint)
        if _all_adapting(layers):
            hidden_states = product(hidden_states, layers)
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


class GatedMLP:
    """An MLP with adapters on all its layers, whose activation is computed with them."""

    gate_proj: AdaptedLinear
    up_proj: AdaptedLinear
    down_proj: AdaptedLinear

    def forward(self, hidden_states: Tensor) -> Any:
        first, last = (self.gate_proj, self.up_proj), self.down_proj
        if not _all_adapting((*first, last)):
            return super().forward(hidden_states)  # type: ignore[misc]
        flat = _flat(hidden_states)
        down, up = _matrices(first)
        opened = Opening.apply(flat, down, _frozen(first))  # type: ignore[no-untyped-call]
        closed = Closing.apply(  # type: ignore[no-untyped-call]
            *opened, up, *_matrices((last,)), _frozen((last,))
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
    downs = [layer.lora_A[NAME].weight for layer in layers]
    ups = [layer.lora_B[NAME].weight * layer.scaling[NAME] for layer in layers]
    if len(layers) == 1:
        return downs[0], ups[0]
    return torch.cat(downs), torch.block_diag(*ups)  # type: ignore[no-untyped-call]


def _frozen(layers: tuple[AdaptedLinear, ...]) -> tuple[nn.Linear, ...]:
    return tuple(layer.base_layer for layer in layers)
