"""Fused decoder layers for full fine-tuning in bf16: layers with a shared input as one GEMM.

`lora.py` does the same for frozen weights with LoRA beside them; here the weights' own gradients
come out of one GEMM, too: for stacked W, `dW = dY^T x` is one matrix whose parts are views. It
takes bf16 weights that are packed into one buffer, which only an engine with split fp32 weights can
give (`pack_trained_weights`); until then nothing is different.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.model.fused_families import SHARED_INPUT_FAMILIES
from shardtune.kernels.rope import rope_qkv, rope_qkv_backward
from shardtune.kernels.stacked_linear import stack_weights, stacked_linear, stacked_linear_backward
from shardtune.kernels.swiglu import swiglu_backward
from shardtune.models.fused.known_source import forward_is, input_goes_to
from shardtune.models.fused.shared_input import (
    GATE_UP,
    MLP_FORWARD,
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
    """Prepares the modules in `layer` to compute layers with a shared input together."""
    if family not in SHARED_INPUT_FAMILIES:
        return
    for module in list(layer.modules()):
        for names in SHARED_INPUT:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(each) is nn.Linear for each in layers):
                _fuse_shared_input(module, names, layers)


def _fuse_shared_input(module: Any, names: tuple[str, ...], layers: list[Any]) -> None:
    kind: Any = type(module)
    if not input_goes_to(kind, names, lost=f"{', '.join(names)} are multiplied one by one"):
        return
    down_proj = getattr(module, "down_proj", None)
    is_swiglu = names == GATE_UP and type(down_proj) is nn.Linear and is_silu(module)
    is_swiglu = is_swiglu and forward_is(kind, MLP_FORWARD, lost="SwiGLU's output is saved")
    is_mlp = is_swiglu and all(each.bias is None for each in (*layers, down_proj))
    for index, layer in enumerate(layers):
        layer.__class__ = SharedInputLinear
        layer.index = index
    module.__class__ = fused_class(FullMLP if is_mlp else FullSharedInput, kind)
    module.shared_input = names
    if names == QKV:
        module.fuses_rope = applies_rope_directly(module, layers)


class SharedInputLinear(nn.Linear):
    """A linear layer that returns its part where the module around it has computed it."""

    index = 0
    """Among the layers that share its input."""

    def forward(self, x: Tensor | PrecomputedOutputs) -> Tensor:
        if not isinstance(x, PrecomputedOutputs):
            return super().forward(x)
        y = x.parts[self.index]
        return y if self.bias is None else y + self.bias


class PackedTrainedWeights(SharedInputLayers):
    """Layers with a shared input whose trained bf16 weights can be packed into one matrix."""

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
    """A module whose trained layers with a shared input are computed together."""

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
    """A SwiGLU MLP without biases. Its activation isn't saved, but recomputed."""

    down_proj: nn.Linear

    def forward(self, hidden_states: Tensor) -> Any:
        if not self.packed:
            return super().forward(hidden_states)  # type: ignore[misc]
        y = SwiGLUMLP.apply(  # type: ignore[no-untyped-call]
            flatten_tokens(hidden_states), *self.weights, self.down_proj.weight
        )
        return y.view(hidden_states.shape)


class StackedLinear(torch.autograd.Function):
    """`x @ [W1; W2; ...].T`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, *others: Tensor) -> Tensor:
        # Told one by one: a compiler that counts arguments would take `ctx` for one of them.
        weights = (first, second, *others)
        ctx.save_for_backward(x, *weights)
        y: Tensor = stacked_linear(None, None, x, weights)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return _stacked_backward(gradients[0].contiguous(), *ctx.saved_tensors)


class StackedLinearRoPE(torch.autograd.Function):
    """Q, K and V from one GEMM, split by head, with RoPE."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, x, *weights)
        rows, length, width = x.shape  # not from cos: see `LoRAQKVRoPE`
        qkv = stacked_linear(None, None, x.reshape(-1, width), weights)
        qkv = qkv.view(rows, length, qkv.shape[1])
        parts: tuple[Tensor, ...] = rope_qkv(qkv, cos, sin, heads)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        cos, sin, x, *weights = ctx.saved_tensors
        no_lora_b = x.new_empty(sum(len(weight) for weight in weights), 0)  # no adapter
        grads = rope_qkv_backward(*gradients, cos, sin, no_lora_b)
        grad_x, *grad_weights = _stacked_backward(grads, x.reshape(-1, x.shape[-1]), *weights)
        return grad_x.view(x.shape), None, None, None, *grad_weights


class SwiGLUMLP(torch.autograd.Function):
    """`(silu(x @ gate.T) * (x @ up.T)) @ down.T`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = stacked_linear(None, None, x, (gate, up))
        ctx.save_for_backward(x, y, gate, up, down)
        gate_out, up_out = y.chunk(2, dim=1)
        result: Tensor = (functional.silu(gate_out) * up_out) @ down.t()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        x, y, gate, up, down = ctx.saved_tensors
        grad_output = gradients[0].contiguous()
        grads, activation = swiglu_backward(grad_output @ down, y)
        return *_stacked_backward(grads, x, gate, up), grad_output.t() @ activation


def _stacked_backward(grad_output: Tensor, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the input, and of each weight: views of one matrix."""
    grad_x = stacked_linear_backward(None, None, grad_output, weights)
    return grad_x, *torch.split(grad_output.t() @ x, [len(weight) for weight in weights])
