"""Decoder layers all of whose weights are trained, in 16 bits: those with one input together.

`lora` does the same for frozen weights with adapters beside them; here the weights' own gradients
come out of one product, too. It takes 16-bit weights that stand below each other, which only an
engine with weights in halves can give (`pack_trained_weights`); until then nothing is different.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.fused_families import SHARED_INPUT_FAMILIES
from shardtune.kernels.rope import rope_qkv, rope_qkv_backward
from shardtune.kernels.stacked_linear import stack_weights, stacked_linear, stacked_linear_backward
from shardtune.kernels.swiglu_backward import swiglu_backward
from shardtune.models.fused.shared_input import (
    GATE_UP,
    QKV,
    SHARED_INPUT,
    PrecomputedOutputs,
    SharedInput,
    SharedInputLayers,
    applies_rope_directly,
    flatten_tokens,
    fused_class,
    is_silu,
)

Gradients = tuple[Tensor | None, ...]


def fuse_full(layer: nn.Module, family: str) -> None:
    """Lets the modules in `layer` compute together what has one input, once they are asked to."""
    if family not in SHARED_INPUT_FAMILIES:
        return
    for module in list(layer.modules()):
        for names in SHARED_INPUT:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(each) is nn.Linear for each in layers):
                _fuse_shared_input(module, names, layers)


def _fuse_shared_input(module: Any, names: tuple[str, ...], layers: list[Any]) -> None:
    last = getattr(module, "down_proj", None)
    gated = names == GATE_UP and type(last) is nn.Linear and is_silu(module)
    closes = gated and all(each.bias is None for each in (*layers, last))
    for index, layer in enumerate(layers):
        layer.__class__ = SharedInputLinear
        layer.index = index
    kind: Any = type(module)
    module.__class__ = fused_class(FullMLP if closes else FullSharedInput, kind)
    module.shared_input = names
    if names == QKV:
        module.fuses_rope = applies_rope_directly(module, layers)


class SharedInputLinear(nn.Linear):
    """A layer that may be given what it would have computed."""

    index = 0
    """Among the layers that have its input."""

    def forward(self, x: Tensor | PrecomputedOutputs) -> Tensor:
        if not isinstance(x, PrecomputedOutputs):
            return super().forward(x)
        y = x.parts[self.index]
        return y if self.bias is None else y + self.bias


class PackedTrainedWeights(SharedInputLayers):
    """Their weights, upper halves, can stand below each other."""

    packed = False
    """Whether they do."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(layer.weight for layer in self.layers)

    def pack_trained_weights(self) -> None:
        """Once weights are as they stay."""
        stack_weights(self.layers, 0)
        self.packed = True


class FullSharedInput(PackedTrainedWeights, SharedInput):
    """A module whose layers with one input are computed together."""

    @property
    def is_ready(self) -> bool:
        return self.packed

    def project_rope(self, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]) -> Any:
        return StackedLinearRoPE.apply(x, cos, sin, heads, *self.weights)  # type: ignore[no-untyped-call]

    def project(self, hidden_states: Tensor) -> Tensor:
        y: Tensor = StackedLinear.apply(  # type: ignore[no-untyped-call]
            flatten_tokens(hidden_states), *self.weights
        )
        return y.view(*hidden_states.shape[:-1], -1)


class FullMLP(PackedTrainedWeights):
    """A gated MLP without biases. What its activation gives isn't kept."""

    down_proj: nn.Linear

    def forward(self, hidden_states: Tensor) -> Any:
        if not self.packed:
            return super().forward(hidden_states)  # type: ignore[misc]
        y = SwiGLUMLP.apply(  # type: ignore[no-untyped-call]
            flatten_tokens(hidden_states), *self.weights, self.down_proj.weight
        )
        return y.view(hidden_states.shape)


class StackedLinear(torch.autograd.Function):
    """`x @ weight.T` for each of the weights, side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, *others: Tensor) -> Tensor:
        # Told one by one: a compiler that counts arguments would take `ctx` for one of them.
        weights = (first, second, *others)
        ctx.save_for_backward(x, *weights)
        y: Tensor = stacked_linear(None, None, x, weights)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return _back(gradients[0].contiguous(), *ctx.saved_tensors)


class StackedLinearRoPE(torch.autograd.Function):
    """The same of queries, keys and values, by head, the first two turned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, x, *weights)
        rows, length, width = x.shape  # not by the angles: see `products.Turned`
        joint = stacked_linear(None, None, x.reshape(-1, width), weights)
        joint = joint.view(rows, length, joint.shape[1])
        parts: tuple[Tensor, ...] = rope_qkv(joint, cos, sin, heads)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        cos, sin, x, *weights = ctx.saved_tensors
        nothing = x.new_empty(sum(len(weight) for weight in weights), 0)  # no adapter
        back = rope_qkv_backward(*gradients, cos, sin, nothing)
        to_x, *to_weights = _back(back, x.reshape(-1, x.shape[-1]), *weights)
        return to_x.view(x.shape), None, None, None, *to_weights


class SwiGLUMLP(torch.autograd.Function):
    """`(silu(x @ gate.T) * (x @ up.T)) @ down.T`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = stacked_linear(None, None, x, (gate, up))
        ctx.save_for_backward(x, y, gate, up, down)
        opened, other = y.chunk(2, dim=1)
        result: Tensor = (functional.silu(opened) * other) @ down.t()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        x, y, gate, up, down = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        back, active = swiglu_backward(gradient @ down, y)
        return *_back(back, x, gate, up), gradient.t() @ active


def _back(gradient: Tensor, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """To the input, and to each of the weights: parts of one matrix, which nobody copies."""
    to_x = stacked_linear_backward(None, None, gradient, weights)
    return to_x, *torch.split(gradient.t() @ x, [len(weight) for weight in weights])
