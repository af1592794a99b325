"""Lets peft's LoRA layers compute through `products`, and those with one input together.

The layers stay peft's, with their names and weights: only their class changes to one that knows a
shorter way. A module that holds layers with one input (attention: queries, keys, values; MLP: gate
and up) computes them before its own forward pass runs, and hands on the joint result in the place
of the input. Each of the layers then only takes its part. What goes back meets in one matrix, which
for queries, keys and values is a kernel's work (`rotary`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from shardtune.core.fused_families import RESIDUAL_FAMILIES, SHARED_INPUT_FAMILIES
from shardtune.kernels.stacked_linear import LinearLayers, stack_weights
from shardtune.models.fused.lora_autograd import LoRALinear, LoRAQKVRoPE, LoRASwiGLUMLP
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
from shardtune.models.peft_adapters import ADAPTER_NAME
from shardtune.models.quantization.fp8 import FP8Linear, StackedFP8Linear
from shardtune.models.quantization.linear import QuantizedLinear

DECODER_LAYER_FORWARD = [
    "residual = hidden_states",
    "hidden_states = self.input_layernorm(hidden_states)",
    "hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, "
    "position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache, "
    "position_embeddings=position_embeddings, **kwargs)",
    "hidden_states = residual + hidden_states",
    "residual = hidden_states",
    "hidden_states = self.post_attention_layernorm(hidden_states)",
    "hidden_states = self.mlp(hidden_states)",
    "hidden_states = residual + hidden_states",
    "return hidden_states",
]
"""What most families' decoder layers do, line by line."""


def fuse_lora(part: nn.Module, family: str) -> None:
    """Gives the plain LoRA layers in `part` the shorter way; others are left as they are."""
    for module in part.modules():
        if type(module) is Linear and _is_plain_lora(module):
            module.__class__ = FusedLoRALinear
    if family in SHARED_INPUT_FAMILIES:
        for module in list(part.modules()):
            for names in SHARED_INPUT:
                _fuse_shared_input(module, names)
        if family in RESIDUAL_FAMILIES:
            _fuse_decoder_layer(part)


def _fuse_decoder_layer(part: Any) -> None:
    """Lets a decoder layer whose MLP can do so be an `FusedDecoderLayer` one."""
    kind: Any = type(part)
    if not isinstance(getattr(part, "mlp", None), LoRAMLP) or not _has_known_forward(kind):
        return
    part.__class__ = fused_class(FusedDecoderLayer, kind)
    last = part.self_attn.o_proj
    if isinstance(last, FusedLoRALinear):
        last.deferred = last.base_layer.bias is None


def _is_plain_lora(layer: Any) -> bool:
    base = layer.base_layer
    return (
        list(layer.active_adapters) == [ADAPTER_NAME]
        and list(layer.lora_A) == [ADAPTER_NAME]
        and not layer.lora_variant
        and isinstance(layer.lora_dropout[ADAPTER_NAME], nn.Identity)
        and layer.lora_B[ADAPTER_NAME].bias is None
        and not layer.fan_in_fan_out
        and isinstance(base, nn.Linear)
        and (type(base) is nn.Linear or isinstance(base, QuantizedLinear))
        and not base.weight.requires_grad
    )


def _fuse_shared_input(module: Any, names: tuple[str, ...]) -> None:
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(layer, FusedLoRALinear) for layer in layers):
        return
    for index, layer in enumerate(layers):
        layer.index = index
    closes = names == GATE_UP and _is_swiglu(module)
    kind: Any = type(module)
    module.__class__ = fused_class(LoRAMLP if closes else LoRASharedInput, kind)
    module.shared_input = names
    bases = [layer.base_layer for layer in layers]
    if names == QKV:
        module.fuses_rope = applies_rope_directly(module, bases)
    if all(isinstance(base, FP8Linear) for base in bases):
        module.add_module("stacked_weights", StackedFP8Linear(bases))


def _is_swiglu(module: Any) -> bool:
    """Whether an MLP is `down_proj(silu(gate_proj(x)) * up_proj(x))`, without biases."""
    last: Any = getattr(module, "down_proj", None)
    layers = (module.gate_proj, module.up_proj, last)
    return (
        isinstance(last, FusedLoRALinear)
        and is_silu(module)
        and all(layer.base_layer.bias is None for layer in layers)
        and len({layer.r[ADAPTER_NAME] for layer in layers[:2]}) == 1
    )


class FusedLoRALinear(Linear):  # type: ignore[misc]
    """A LoRA layer of peft that computes at once, or takes its part of what was joined."""

    index = 0
    """Among the layers that have its input."""
    deferred = False
    """Whether it is left to the decoder layer around it, which computes it with what it adds: by
    itself attention gives what goes into this layer then."""

    @property
    def is_active(self) -> bool:
        return (
            not self.disable_adapters and not self.merged and self.active_adapters == [ADAPTER_NAME]
        )

    @property
    def is_deferred(self) -> bool:
        """Not where somebody watches it."""
        watched = self._forward_hooks or self._forward_pre_hooks
        return self.deferred and self.is_active and not watched

    def forward(self, x: Tensor | PrecomputedOutputs, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, PrecomputedOutputs):
            y = x.parts[self.index]
        elif self.is_deferred:
            return x
        elif self.is_active:
            y = lora_linear(x, (self,))
        else:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        bias = self.base_layer.bias
        return y if bias is None else y + bias.to(y.dtype)


class PackedFrozenWeights(SharedInputLayers):
    """Their frozen weights can stand below each other."""

    def pack_weights(self) -> None:
        """Once they are there."""
        frozen = _base_layers(self.layers)
        if all(type(layer) is nn.Linear for layer in frozen):
            stack_weights(frozen, sum(layer.r[ADAPTER_NAME] for layer in self.layers))


class LoRASharedInput(PackedFrozenWeights, SharedInput):
    """A module whose layers with one input are computed together."""

    @property
    def is_ready(self) -> bool:
        return _all_active(self.layers)

    def project_rope(self, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]) -> Any:
        return LoRAQKVRoPE.apply(  # type: ignore[no-untyped-call]
            x, *_stacked_lora_matrices(self.layers), cos, sin, heads, _base_layers(self.layers)
        )

    def project(self, hidden_states: Tensor) -> Tensor:
        return lora_linear(hidden_states, self.layers)


class LoRAMLP(PackedFrozenWeights):
    """An MLP with adapters on all its layers, whose activation is computed with them."""

    down_proj: FusedLoRALinear

    def forward(self, hidden_states: Tensor, past: Tensor | None = None) -> Any:
        """Added to what went `past` it, if anything did."""
        first, last = self.layers, (self.down_proj,)
        if not _all_active((*first, *last)):
            y = super().forward(hidden_states)  # type: ignore[misc]
            return y if past is None else past + y
        downs, ups = _lora_matrices(first)
        matrices = (torch.cat(downs), torch.cat(ups), *_stacked_lora_matrices(last))
        frozen = (_base_layers(first), _base_layers(last))

        def compute(x: Tensor, past: Tensor | None) -> Tensor:
            y: Tensor = LoRASwiGLUMLP.apply(  # type: ignore[no-untyped-call]
                x, *matrices, past, *frozen
            )
            return y

        return _add_residual(compute, hidden_states, past)


class FusedDecoderLayer:
    """A decoder layer that adds what attention and MLP give to what went past them in the pass that
    adds LoRA's part. At its end it would otherwise be a pass of its own, because the next layer is
    compiled apart."""

    self_attn: nn.Module
    mlp: LoRAMLP
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        last: Any = self.self_attn.o_proj
        if isinstance(last, FusedLoRALinear) and last.is_deferred:
            hidden_states = lora_linear(attended, (last,), hidden_states)
        else:
            hidden_states = hidden_states + attended
        x = self.post_attention_layernorm(hidden_states)
        result: Tensor = self.mlp(x, hidden_states)  # type: ignore[operator]
        return result


@cache
def _has_known_forward(kind: type) -> bool:
    """Whether a decoder layer's source is the one that `FusedDecoderLayer` was written for."""
    forward: Any = kind.forward  # type: ignore[attr-defined]
    try:
        (written,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # there is no code to be read
        return False
    if not isinstance(written, ast.FunctionDef) or written.decorator_list:
        return False
    given = [each.arg for each in written.args.args]
    own = [*inspect.signature(FusedDecoderLayer.forward).parameters][:-1]
    return given == own and [ast.unparse(line) for line in written.body] == DECODER_LAYER_FORWARD


def _all_active(layers: tuple[nn.Module, ...]) -> bool:
    """False too where peft has taken an adapter out: its layer is an ordinary one again."""
    return all(isinstance(layer, FusedLoRALinear) and layer.is_active for layer in layers)


def lora_linear(
    x: Tensor, layers: tuple[FusedLoRALinear, ...], past: Tensor | None = None
) -> Tensor:
    """What `layers` make of their common input, side by side, without their biases; added to what
    went `past` them, if anything did."""
    matrices, frozen = _stacked_lora_matrices(layers), _base_layers(layers)

    def compute(x: Tensor, past: Tensor | None) -> Tensor:
        y: Tensor = LoRALinear.apply(x, *matrices, past, frozen)  # type: ignore[no-untyped-call]
        return y

    return _add_residual(compute, x, past)


def _add_residual(
    compute: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, past: Tensor | None
) -> Tensor:
    """Computes with a row for each token. What went past is added afterwards if it is finer."""
    flat = flatten_tokens(x)
    if past is not None and past.dtype == flat.dtype:
        return compute(flat, past)
    y = compute(flat, None)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if past is None else past + y


def _stacked_lora_matrices(layers: tuple[FusedLoRALinear, ...]) -> tuple[Tensor, Tensor]:
    """LoRA's matrices as those of one layer, in which none sees what another's have made."""
    downs, ups = _lora_matrices(layers)
    if len(layers) == 1:
        return downs[0], ups[0]
    return torch.cat(downs), torch.block_diag(*ups)  # type: ignore[no-untyped-call]


def _lora_matrices(layers: tuple[FusedLoRALinear, ...]) -> tuple[list[Tensor], list[Tensor]]:
    downs = [layer.lora_A[ADAPTER_NAME].weight for layer in layers]
    return downs, [
        layer.lora_B[ADAPTER_NAME].weight * layer.scaling[ADAPTER_NAME] for layer in layers
    ]


def _base_layers(layers: tuple[FusedLoRALinear, ...]) -> LinearLayers:
    return tuple(layer.base_layer for layer in layers)
