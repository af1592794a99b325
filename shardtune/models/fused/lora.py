"""Fused LoRA layers: peft's layers change class to one whose forward and backward are fused.

The layers stay peft's, with their names and weights: only their class changes. A module that holds
layers with a shared input (attention: Q, K, V; MLP: gate, up) computes them before its own forward
runs, and hands on the result in the place of the input; each of the layers then returns its part.
In the backward pass their gradients are columns of one matrix, so it is one GEMM there, too. Where
a class isn't, by its source, the one that ours was written for, it is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from shardtune.core.model.fused_families import RESIDUAL_FAMILIES, SHARED_INPUT_FAMILIES
from shardtune.kernels.lora_dropout import LARGEST_DROPOUT_RANK, dropout_seed
from shardtune.kernels.stacked_linear import LinearLayers, stack_weights
from shardtune.models.experts.swiglu_experts import fuse_experts
from shardtune.models.fused.dora import scale_by_magnitude, why_not_dora
from shardtune.models.fused.known_source import forward_has, forward_is, input_goes_to, say_once
from shardtune.models.fused.lora_autograd import LoRALinear, LoRAQKVRoPE, LoRASwiGLUMLP
from shardtune.models.fused.shared_input import (
    GATE_UP,
    MLP_FORWARD,
    QKV,
    SHARED_INPUT,
    STACKED_GATE_UP,
    STACKED_MLP_FORWARD,
    PrecomputedOutputs,
    SharedInput,
    SharedInputLayers,
    applies_rope_directly,
    flatten_tokens,
    fused_class,
    is_silu,
)
from shardtune.models.peft_adapters import ADAPTER_NAME
from shardtune.models.quantization.bitsandbytes_linear import QuantizedLinear
from shardtune.models.quantization.fp8_linear import FP8Linear, StackedFP8Linear

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
"""The forward of most families' decoder layers, which `FusedDecoderLayer` replaces."""
DROPPING_LAYER_FORWARD = [
    *DECODER_LAYER_FORWARD[:2],
    DECODER_LAYER_FORWARD[2].replace("hidden_states, _", "hidden_states, self_attn_weights", 1),
    "hidden_states = residual + self.resid_attn_dropout(hidden_states)",
    *DECODER_LAYER_FORWARD[4:7],
    "hidden_states = residual + self.resid_mlp_dropout(hidden_states)",
    DECODER_LAYER_FORWARD[8],
]
"""The same with dropout before each residual (Phi-3), which is mostly 0."""
FALCON_LINEAR_FORWARD = [
    "hidden_states = input @ self.weight.T",
    "if self.bias is None:\n    return hidden_states",
    "return hidden_states + self.bias",
]
"""Falcon's linear layer: `nn.Linear` in other words."""
LORA_FORWARD = (
    "result = self.base_layer(x, *args, **kwargs)",
    "result = result + lora_B(lora_A(dropout(x))) * scaling",
)
"""What peft's LoRA layer computes, which `FusedLoRALinear` replaces."""
QKV_SEED, GATE_UP_SEED, DOWN_SEED = -1, -2, -3
"""Numbers of the dropout masks of joint layers, beside those of single ones."""


def fuse_lora(part: nn.Module, family: str) -> None:
    """Fuses the plain LoRA layers in `part`; others are left as they are."""
    if not forward_has(Linear, LORA_FORWARD, lost="LoRA layers are not fused"):
        return
    for number, module in enumerate(part.modules()):
        if type(module) is not Linear:
            continue
        if why := why_not_fused(module):
            say_once(f"LoRA layers run as peft computes them: {why}")
            continue
        module.__class__ = FusedLoRALinear
        module.seed_number = number  # type: ignore[assignment]
        module.is_dora = bool(module.lora_variant)  # type: ignore[assignment]
    fuse_experts(part)
    if family in SHARED_INPUT_FAMILIES:
        for module in list(part.modules()):
            for names in SHARED_INPUT:
                _fuse_shared_input(module, names)
            _fuse_stacked_mlp(module)
        if family in RESIDUAL_FAMILIES:
            _fuse_decoder_layer(part)


def _fuse_decoder_layer(part: Any) -> None:
    """Makes a decoder layer whose MLP is fused a `FusedDecoderLayer`, if its source is known."""
    kind: Any = type(part)
    if not isinstance(getattr(part, "mlp", None), LoRAMLP):
        return
    parameters = [*inspect.signature(FusedDecoderLayer.forward).parameters][:-1]
    lost = "residuals are added in a pass of their own"
    drops = [getattr(part, name, None) for name in ("resid_attn_dropout", "resid_mlp_dropout")]
    known = DECODER_LAYER_FORWARD if drops == [None, None] else DROPPING_LAYER_FORWARD
    if any(each is not None and each.p > 0 for each in drops):
        return
    if not forward_is(kind, known, parameters, lost=lost):
        return
    part.__class__ = fused_class(FusedDecoderLayer, kind)
    output_proj = part.self_attn.o_proj
    if isinstance(output_proj, FusedLoRALinear):
        output_proj.deferred = output_proj.base_layer.bias is None


def why_not_fused(layer: Any) -> str:
    """Why a LoRA layer of peft stays as it is; nothing if it can be fused."""
    base = layer.base_layer
    if list(layer.active_adapters) != [ADAPTER_NAME] or list(layer.lora_A) != [ADAPTER_NAME]:
        return "they have several adapters"
    dropout, variant = layer.lora_dropout[ADAPTER_NAME], layer.lora_variant.get(ADAPTER_NAME)
    reasons = (
        (
            variant is not None and ADAPTER_NAME not in layer.lora_magnitude_vector,
            f"{type(variant).__name__} is not known here",
        ),
        (
            not isinstance(dropout, nn.Identity | nn.Dropout),
            f"{type(dropout).__name__} is no plain dropout",
        ),
        (layer.lora_B[ADAPTER_NAME].bias is not None, "B has a bias"),
        (
            layer.fan_in_fan_out or not isinstance(base, nn.Linear),
            f"they are beside {type(base).__name__}, not nn.Linear",
        ),
        (
            not (_is_linear(type(base)) or isinstance(base, QuantizedLinear)),
            f"{type(base).__name__} may compute something else than nn.Linear",
        ),
        (base.weight.requires_grad, "their base weights are trained, too"),
    )
    found = next((why for holds, why in reasons if holds), "")
    return found or ("" if variant is None else why_not_dora(layer, ADAPTER_NAME))


def _is_linear(kind: type) -> bool:
    """Whether a class computes what `nn.Linear` computes."""
    if kind.__name__ == "FalconLinear":
        return forward_is(kind, FALCON_LINEAR_FORWARD, lost="LoRA layers are not fused")
    return kind is nn.Linear


def _fuse_stacked_mlp(module: Any) -> None:
    """Fuses an MLP whose gate and up are one layer."""
    layers = [getattr(module, name, None) for name in (*STACKED_GATE_UP, "down_proj")]
    if not all(isinstance(layer, FusedLoRALinear) for layer in layers):
        return
    first, last = layers
    kind: type = type(module)
    lost = "SwiGLU is not fused with LoRA"
    if (
        is_silu(module)
        and forward_is(kind, STACKED_MLP_FORWARD, lost=lost)
        and _fits_swiglu((first, first, last))
    ):
        module.__class__ = fused_class(StackedLoRAMLP, kind)
        module.shared_input = STACKED_GATE_UP


def _fuse_shared_input(module: Any, names: tuple[str, ...]) -> None:
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(layer, FusedLoRALinear) for layer in layers):
        fused = [n for n, each in zip(names, layers, strict=True) if _is_fused(each)]
        if fused and all(each is not None for each in layers):
            apart = ", ".join(fused)
            say_once(f"{apart}: not one product with the others, which have no such adapter")
        return
    drops = any(layer.drops for layer in layers)
    if drops and len({(layer.r[ADAPTER_NAME], layer.drops) for layer in layers}) > 1:
        say_once(f"{', '.join(names)}: one by one, for their ranks differ and they have dropout")
        return  # masks are for layers that are alike
    for index, layer in enumerate(layers):
        layer.index = index
    kind: Any = type(module)
    if not input_goes_to(kind, names, lost=f"{', '.join(names)} are multiplied one by one"):
        return
    is_mlp = names == GATE_UP and _is_swiglu(module)
    module.__class__ = fused_class(LoRAMLP if is_mlp else LoRASharedInput, kind)
    module.shared_input = names
    bases = [layer.base_layer for layer in layers]
    if names == QKV:
        scaled = any(layer.is_dora for layer in layers)  # before they are rotated
        module.fuses_rope = not scaled and applies_rope_directly(module, bases)
    if all(isinstance(base, FP8Linear) for base in bases):
        module.add_module("stacked_weights", StackedFP8Linear(bases))


def _is_swiglu(module: Any) -> bool:
    """Whether an MLP is `down_proj(silu(gate_proj(x)) * up_proj(x))`, without biases."""
    output_proj: Any = getattr(module, "down_proj", None)
    layers = (module.gate_proj, module.up_proj, output_proj)
    return (
        isinstance(output_proj, FusedLoRALinear)
        and is_silu(module)
        and forward_is(type(module), MLP_FORWARD, lost="SwiGLU is not fused with LoRA")
        and _fits_swiglu(layers)
    )


def _fits_swiglu(layers: tuple[Any, ...]) -> bool:
    """Whether gate, up and down are what `LoRASwiGLUMLP` takes."""
    ranks = _ranks(layers)
    if ranks[0] != ranks[1] or len({layer.drops for layer in layers}) > 1:
        say_once("SwiGLU is left to the compiler: adapters of gate, up and down differ")
        return False
    return (
        not any(layer.is_dora for layer in layers)
        and all(layer.base_layer.bias is None for layer in layers)
        and (not layers[0].drops or max(ranks) <= LARGEST_DROPOUT_RANK)
    )


def _is_fused(layer: Any) -> bool:
    return isinstance(layer, FusedLoRALinear)


def _ranks(layers: tuple[Any, ...]) -> list[int]:
    return [layer.r[ADAPTER_NAME] for layer in layers]


class FusedLoRALinear(Linear):  # type: ignore[misc]
    """A LoRA layer of peft, fused; or its part of what the module around it has computed."""

    index = 0
    """Among the layers that share its input."""
    seed_number = 0
    """Tells its dropout from that of others in its decoder layer."""
    is_dora = False
    """Whether its outputs have magnitudes of their own."""
    deferred = False
    """Whether the decoder layer around it computes it, together with the residual: attention then
    returns this layer's input."""

    @property
    def is_active(self) -> bool:
        return (
            not self.disable_adapters and not self.merged and self.active_adapters == [ADAPTER_NAME]
        )

    @property
    def drops(self) -> float:
        """The share of its input that is dropped in training."""
        dropout = self.lora_dropout[ADAPTER_NAME]
        return float(dropout.p) if isinstance(dropout, nn.Dropout) else 0.0

    @property
    def is_deferred(self) -> bool:
        """Not where hooks watch it."""
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
        if self.is_dora:
            y = scale_by_magnitude(self, ADAPTER_NAME, y)
        bias = self.base_layer.bias
        return y if bias is None else y + bias.to(y.dtype)


class PackedFrozenWeights(SharedInputLayers):
    """Layers with a shared input whose frozen weights can be packed into one matrix."""

    @property
    def spare(self) -> int:
        """Rows below them, for what of A is multiplied with them."""
        return sum(layer.r[ADAPTER_NAME] for layer in self.layers)

    def pack_weights(self) -> None:
        """Once the weights are there."""
        frozen = _base_layers(self.layers)
        if all(type(layer) is nn.Linear for layer in frozen):
            stack_weights(frozen, self.spare)


class LoRASharedInput(PackedFrozenWeights, SharedInput):
    """A module whose LoRA layers with a shared input are computed together."""

    @property
    def is_ready(self) -> bool:
        return _all_active(self.layers)

    def project_rope(self, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]) -> Any:
        matrices, frozen = _stacked_lora_matrices(self.layers), _base_layers(self.layers)
        seed, p = _dropout(x, self.layers, QKV_SEED)
        return LoRAQKVRoPE.apply(  # type: ignore[no-untyped-call]
            x, *matrices, cos, sin, heads, frozen, seed, p
        )

    def project(self, hidden_states: Tensor) -> Tensor:
        return lora_linear(hidden_states, self.layers)


class LoRAMLP(PackedFrozenWeights):
    """A SwiGLU MLP with LoRA on all its layers, fused (`LoRASwiGLUMLP`)."""

    down_proj: FusedLoRALinear

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """The MLP, plus the residual if there is one."""
        first, output_proj = self.layers, (self.down_proj,)
        if not _all_active((*first, *output_proj)):
            y = super().forward(hidden_states)  # type: ignore[misc]
            return y if residual is None else residual + y
        matrices = (*self.gate_up_matrices(), *_stacked_lora_matrices(output_proj))
        frozen = (_base_layers(first), _base_layers(output_proj))
        seed, p = _dropout(hidden_states, first, GATE_UP_SEED)
        next_seed, _ = _dropout(hidden_states, output_proj, DOWN_SEED)

        def compute(x: Tensor, residual: Tensor | None) -> Tensor:
            y: Tensor = LoRASwiGLUMLP.apply(  # type: ignore[no-untyped-call]
                x, *matrices, residual, *frozen, seed, next_seed, p
            )
            return y

        return _add_residual(compute, hidden_states, residual)

    def gate_up_matrices(self) -> tuple[Tensor, Tensor]:
        """A and B of gate and up, one below the other."""
        lora_a, lora_b = _lora_matrices(self.layers)
        return torch.cat(lora_a), torch.cat(lora_b)


class StackedLoRAMLP(LoRAMLP):
    """The same where gate and up are one layer with one adapter: both have its A."""

    @property
    def spare(self) -> int:
        return 2 * super().spare

    def gate_up_matrices(self) -> tuple[Tensor, Tensor]:
        (lora_a,), (lora_b,) = _lora_matrices(self.layers)
        return torch.cat([lora_a, lora_a]), lora_b


class FusedDecoderLayer:
    """A decoder layer that adds the residual in the pass that adds LoRA (`lora_residual.py`).
    Otherwise the addition at its end is a pass of its own, because the next layer is compiled
    apart."""

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
        output_proj: Any = self.self_attn.o_proj
        if isinstance(output_proj, FusedLoRALinear) and output_proj.is_deferred:
            hidden_states = lora_linear(attended, (output_proj,), hidden_states)
        else:
            hidden_states = hidden_states + attended
        x = self.post_attention_layernorm(hidden_states)
        result: Tensor = self.mlp(x, hidden_states)  # type: ignore[operator]
        return result


def _all_active(layers: tuple[nn.Module, ...]) -> bool:
    """False too where peft has taken an adapter out: its layer is an ordinary one again."""
    return all(isinstance(layer, FusedLoRALinear) and layer.is_active for layer in layers)


def lora_linear(
    x: Tensor, layers: tuple[FusedLoRALinear, ...], residual: Tensor | None = None
) -> Tensor:
    """The outputs of `layers` for their shared input, side by side, without biases; plus the
    residual if there is one."""
    matrices, frozen = _stacked_lora_matrices(layers), _base_layers(layers)
    seed, p = _dropout(x, layers, layers[0].seed_number)

    def compute(x: Tensor, residual: Tensor | None) -> Tensor:
        y: Tensor = LoRALinear.apply(  # type: ignore[no-untyped-call]
            x, *matrices, residual, frozen, seed, p
        )
        return y

    return _add_residual(compute, x, residual)


def _dropout(
    x: Tensor, layers: tuple[FusedLoRALinear, ...], number: int
) -> tuple[Tensor | None, float]:
    """A seed for the masks of layers with a shared input, and the share that they drop; no seed
    where nothing is dropped."""
    p = layers[0].drops if layers[0].training else 0.0
    return (dropout_seed(x, number), p) if p else (None, 0.0)


def _add_residual(
    compute: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, residual: Tensor | None
) -> Tensor:
    """Computes with a row for each token. A residual in a finer dtype is added afterwards."""
    flat = flatten_tokens(x)
    if residual is not None and residual.dtype == flat.dtype:
        return compute(flat, residual)
    y = compute(flat, None)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if residual is None else residual + y


def _stacked_lora_matrices(layers: tuple[FusedLoRALinear, ...]) -> tuple[Tensor, Tensor]:
    """A and B of one layer that stands for all: A stacked, B block-diagonal."""
    lora_a, lora_b = _lora_matrices(layers)
    if len(layers) == 1:
        return lora_a[0], lora_b[0]
    return torch.cat(lora_a), torch.block_diag(*lora_b)  # type: ignore[no-untyped-call]


def _lora_matrices(layers: tuple[FusedLoRALinear, ...]) -> tuple[list[Tensor], list[Tensor]]:
    lora_a = [layer.lora_A[ADAPTER_NAME].weight for layer in layers]
    return lora_a, [
        layer.lora_B[ADAPTER_NAME].weight * layer.scaling[ADAPTER_NAME] for layer in layers
    ]


def _base_layers(layers: tuple[FusedLoRALinear, ...]) -> LinearLayers:
    return tuple(layer.base_layer for layer in layers)
