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

from shardtune.core.fused_families import ADDED, JOINED
from shardtune.kernels.stacked_linear import Layers, stand_together
from shardtune.models.fused.lora_autograd import Adapted, GatedProducts, Turned
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
from shardtune.models.peft_adapters import NAME
from shardtune.models.quantization.fp8 import FP8Linear, JointFP8
from shardtune.models.quantization.linear import QuantisedLinear

LAYER = [
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


def quicken(part: nn.Module, family: str) -> None:
    """Gives the plain LoRA layers in `part` the shorter way; others are left as they are."""
    for module in part.modules():
        if type(module) is Linear and _is_plain(module):
            module.__class__ = AdaptedLinear
    if family in JOINED:
        for module in list(part.modules()):
            for names in JOINT:
                _join(module, names)
        if family in ADDED:
            _add_early(part)


def _add_early(part: Any) -> None:
    """Lets a decoder layer whose MLP can do so be an `Adding` one."""
    kind: Any = type(part)
    if not isinstance(getattr(part, "mlp", None), GatedMLP) or not _is_known(kind):
        return
    part.__class__ = with_way(Adding, kind)
    last = part.self_attn.o_proj
    if isinstance(last, AdaptedLinear):
        last.left = last.base_layer.bias is None


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
    module.__class__ = with_way(GatedMLP if closes else Joining, kind)
    module.joint = names
    bases = [layer.base_layer for layer in layers]
    if names == ATTENTION:
        module.turns = turns_at_once(module, bases)
    if all(isinstance(base, FP8Linear) for base in bases):
        module.add_module("joint_weights", JointFP8(bases))


def _is_gated(module: Any) -> bool:
    """Whether an MLP is `down_proj(silu(gate_proj(x)) * up_proj(x))`, without biases."""
    last: Any = getattr(module, "down_proj", None)
    layers = (module.gate_proj, module.up_proj, last)
    return (
        isinstance(last, AdaptedLinear)
        and is_silu(module)
        and all(layer.base_layer.bias is None for layer in layers)
        and len({layer.r[NAME] for layer in layers[:2]}) == 1
    )


class AdaptedLinear(Linear):  # type: ignore[misc]
    """A LoRA layer of peft that computes at once, or takes its part of what was joined."""

    place = 0
    """Among the layers that have its input."""
    left = False
    """Whether it is left to the decoder layer around it, which computes it with what it adds: by
    itself attention gives what goes into this layer then."""

    @property
    def adapting(self) -> bool:
        return not self.disable_adapters and not self.merged and self.active_adapters == [NAME]

    @property
    def is_left(self) -> bool:
        """Not where somebody watches it."""
        watched = self._forward_hooks or self._forward_pre_hooks
        return self.left and self.adapting and not watched

    def forward(self, x: Tensor | Pieces, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, Pieces):
            y = x.parts[self.place]
        elif self.is_left:
            return x
        elif self.adapting:
            y = product(x, (self,))
        else:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        bias = self.base_layer.bias
        return y if bias is None else y + bias.to(y.dtype)


class OnFrozen(Together):
    """Their frozen weights can stand below each other."""

    def join_weights(self) -> None:
        """Once they are there."""
        frozen = _frozen(self.layers)
        if all(type(layer) is nn.Linear for layer in frozen):
            stand_together(frozen, sum(layer.r[NAME] for layer in self.layers))


class Joining(OnFrozen, Ahead):
    """A module whose layers with one input are computed together."""

    @property
    def is_ready(self) -> bool:
        return _all_adapting(self.layers)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]) -> Any:
        return Turned.apply(  # type: ignore[no-untyped-call]
            x, *_matrices(self.layers), cos, sin, heads, _frozen(self.layers)
        )

    def product(self, hidden_states: Tensor) -> Tensor:
        return product(hidden_states, self.layers)


class GatedMLP(OnFrozen):
    """An MLP with adapters on all its layers, whose activation is computed with them."""

    down_proj: AdaptedLinear

    def forward(self, hidden_states: Tensor, past: Tensor | None = None) -> Any:
        """Added to what went `past` it, if anything did."""
        first, last = self.layers, (self.down_proj,)
        if not _all_adapting((*first, *last)):
            y = super().forward(hidden_states)  # type: ignore[misc]
            return y if past is None else past + y
        downs, ups = _pairs(first)
        matrices = (torch.cat(downs), torch.cat(ups), *_matrices(last))
        frozen = (_frozen(first), _frozen(last))

        def compute(x: Tensor, past: Tensor | None) -> Tensor:
            y: Tensor = GatedProducts.apply(  # type: ignore[no-untyped-call]
                x, *matrices, past, *frozen
            )
            return y

        return _with_past(compute, hidden_states, past)


class Adding:
    """A decoder layer that adds what attention and MLP give to what went past them in the pass that
    adds LoRA's part. At its end it would otherwise be a pass of its own, because the next layer is
    compiled apart."""

    self_attn: nn.Module
    mlp: GatedMLP
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
        if isinstance(last, AdaptedLinear) and last.is_left:
            hidden_states = product(attended, (last,), hidden_states)
        else:
            hidden_states = hidden_states + attended
        x = self.post_attention_layernorm(hidden_states)
        result: Tensor = self.mlp(x, hidden_states)  # type: ignore[operator]
        return result


@cache
def _is_known(kind: type) -> bool:
    """Whether a decoder layer of transformers does what `Adding` does, told by its code."""
    forward: Any = kind.forward  # type: ignore[attr-defined]
    try:
        (written,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # there is no code to be read
        return False
    if not isinstance(written, ast.FunctionDef) or written.decorator_list:
        return False
    given = [each.arg for each in written.args.args]
    own = [*inspect.signature(Adding.forward).parameters][:-1]
    return given == own and [ast.unparse(line) for line in written.body] == LAYER


def _all_adapting(layers: tuple[nn.Module, ...]) -> bool:
    """False too where peft has taken an adapter out: its layer is an ordinary one again."""
    return all(isinstance(layer, AdaptedLinear) and layer.adapting for layer in layers)


def product(x: Tensor, layers: tuple[AdaptedLinear, ...], past: Tensor | None = None) -> Tensor:
    """What `layers` make of their common input, side by side, without their biases; added to what
    went `past` them, if anything did."""
    matrices, frozen = _matrices(layers), _frozen(layers)

    def compute(x: Tensor, past: Tensor | None) -> Tensor:
        y: Tensor = Adapted.apply(x, *matrices, past, frozen)  # type: ignore[no-untyped-call]
        return y

    return _with_past(compute, x, past)


def _with_past(
    compute: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, past: Tensor | None
) -> Tensor:
    """Computes with a row for each token. What went past is added afterwards if it is finer."""
    flat = by_token(x)
    if past is not None and past.dtype == flat.dtype:
        return compute(flat, past)
    y = compute(flat, None)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if past is None else past + y


def _matrices(layers: tuple[AdaptedLinear, ...]) -> tuple[Tensor, Tensor]:
    """LoRA's matrices as those of one layer, in which none sees what another's have made."""
    downs, ups = _pairs(layers)
    if len(layers) == 1:
        return downs[0], ups[0]
    return torch.cat(downs), torch.block_diag(*ups)  # type: ignore[no-untyped-call]


def _pairs(layers: tuple[AdaptedLinear, ...]) -> tuple[list[Tensor], list[Tensor]]:
    downs = [layer.lora_A[NAME].weight for layer in layers]
    return downs, [layer.lora_B[NAME].weight * layer.scaling[NAME] for layer in layers]


def _frozen(layers: tuple[AdaptedLinear, ...]) -> Layers:
    return tuple(layer.base_layer for layer in layers)
