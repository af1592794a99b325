"""Decoder layers all of whose weights are trained, in 16 bits: those with one input together.

`lora` does the same for frozen weights with adapters beside them; here the weights' own gradients
come out of one product, too. It takes 16-bit weights that stand below each other, which only an
engine with weights in halves can give (`join_halves`); until then nothing is different.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.fused_families import JOINED
from shardtune.kernels.rope import turned, turned_back
from shardtune.kernels.stacked_linear import across, back_across, stand_together
from shardtune.kernels.swiglu_backward import opened_back
from shardtune.models.fused.shared_input import (
    ATTENTION,
    GATED,
    JOINT,
    Ahead,
    Pieces,
    Together,
    by_token,
    is_silu,
    turns_at_once,
    with_way,
)

Gradients = tuple[Tensor | None, ...]


def prepare(layer: nn.Module, family: str) -> None:
    """Lets the modules in `layer` compute together what has one input, once they are asked to."""
    if family not in JOINED:
        return
    for module in list(layer.modules()):
        for names in JOINT:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(each) is nn.Linear for each in layers):
                _prepare(module, names, layers)


def _prepare(module: Any, names: tuple[str, ...], layers: list[Any]) -> None:
    last = getattr(module, "down_proj", None)
    gated = names == GATED and type(last) is nn.Linear and is_silu(module)
    closes = gated and all(each.bias is None for each in (*layers, last))
    for place, layer in enumerate(layers):
        layer.__class__ = JointLinear
        layer.place = place
    kind: Any = type(module)
    module.__class__ = with_way(WholeMLP if closes else Opening, kind)
    module.joint = names
    if names == ATTENTION:
        module.turns = turns_at_once(module, layers)


class JointLinear(nn.Linear):
    """A layer that may be given what it would have computed."""

    place = 0
    """Among the layers that have its input."""

    def forward(self, x: Tensor | Pieces) -> Tensor:
        if not isinstance(x, Pieces):
            return super().forward(x)
        y = x.parts[self.place]
        return y if self.bias is None else y + self.bias


class OnHalves(Together):
    """Their weights, upper halves, can stand below each other."""

    joined = False
    """Whether they do."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(layer.weight for layer in self.layers)

    def join_halves(self) -> None:
        """Once weights are as they stay."""
        stand_together(self.layers, 0)
        self.joined = True


class Opening(OnHalves, Ahead):
    """A module whose layers with one input are computed together."""

    @property
    def is_ready(self) -> bool:
        return self.joined

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]) -> Any:
        return TurnedProducts.apply(x, cos, sin, heads, *self.weights)  # type: ignore[no-untyped-call]

    def product(self, hidden_states: Tensor) -> Tensor:
        y: Tensor = Products.apply(  # type: ignore[no-untyped-call]
            by_token(hidden_states), *self.weights
        )
        return y.view(*hidden_states.shape[:-1], -1)


class WholeMLP(OnHalves):
    """A gated MLP without biases. What its activation gives isn't kept."""

    down_proj: nn.Linear

    def forward(self, hidden_states: Tensor) -> Any:
        if not self.joined:
            return super().forward(hidden_states)  # type: ignore[misc]
        y = GatedProducts.apply(  # type: ignore[no-untyped-call]
            by_token(hidden_states), *self.weights, self.down_proj.weight
        )
        return y.view(hidden_states.shape)


class Products(torch.autograd.Function):
    """`x @ weight.T` for each of the weights, side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, *others: Tensor) -> Tensor:
        # Told one by one: a compiler that counts arguments would take `ctx` for one of them.
        weights = (first, second, *others)
        ctx.save_for_backward(x, *weights)
        y: Tensor = across(None, None, x, weights)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return _back(gradients[0].contiguous(), *ctx.saved_tensors)


class TurnedProducts(torch.autograd.Function):
    """The same of queries, keys and values, by head, the first two turned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, x, *weights)
        rows, length, width = x.shape  # not by the angles: see `products.Turned`
        joint = across(None, None, x.reshape(-1, width), weights)
        joint = joint.view(rows, length, joint.shape[1])
        parts: tuple[Tensor, ...] = turned(joint, cos, sin, heads)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        cos, sin, x, *weights = ctx.saved_tensors
        nothing = x.new_empty(sum(len(weight) for weight in weights), 0)  # no adapter
        back = turned_back(*gradients, cos, sin, nothing)
        to_x, *to_weights = _back(back, x.reshape(-1, x.shape[-1]), *weights)
        return to_x.view(x.shape), None, None, None, *to_weights


class GatedProducts(torch.autograd.Function):
    """`(silu(x @ gate.T) * (x @ up.T)) @ down.T`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = across(None, None, x, (gate, up))
        ctx.save_for_backward(x, y, gate, up, down)
        opened, other = y.chunk(2, dim=1)
        result: Tensor = (functional.silu(opened) * other) @ down.t()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        x, y, gate, up, down = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        back, active = opened_back(gradient @ down, y)
        return *_back(back, x, gate, up), gradient.t() @ active


def _back(gradient: Tensor, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """To the input, and to each of the weights: parts of one matrix, which nobody copies."""
    to_x = back_across(None, None, gradient, weights)
    return to_x, *torch.split(gradient.t() @ x, [len(weight) for weight in weights])
