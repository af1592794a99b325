"""A quantized model in bitsandbytes' own layers: the layout that plain transformers reads.

Training has layers of its own (see `bitsandbytes_linear`). Their codes and scales are those of
bitsandbytes, so they can change places with its layers without being quantized again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardtune.compat.quiet import without_int8_warnings
from shardtune.errors import ModelError, Problem
from shardtune.models.quantization.bitsandbytes_linear import (
    Int8Linear,
    NF4Linear,
    QuantizedLinear,
    import_bitsandbytes,
)
from shardtune.models.quantization.nf4_experts import NF4Experts

INT8_STEPS = 127
"""bitsandbytes keeps a row's largest weight for a scale, not the step between two codes."""


def require_bitsandbytes_layers(kind: str, place: str, fix: str) -> None:
    """Refuses a machine on which bitsandbytes can't compute with such weights, by trying."""
    layer = {"nf4": NF4Linear, "int8": Int8Linear}[kind](nn.Linear(64, 64, False), torch.float32)
    layer.quantize(torch.eye(64))
    try:
        with without_int8_warnings():
            found = bitsandbytes_layer(layer).eval()(torch.ones(1, 64))
    except Exception as error:  # a kernel that is missing is anything from OSError to RuntimeError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fact = f"bitsandbytes can't compute with {kind} weights on this CPU: {reason}"
        raise ModelError(Problem(place, fact, fix)) from error
    if not torch.allclose(found, torch.ones(1, 64), atol=0.02):
        fact = f"bitsandbytes computes {found.mean():.3g} instead of 1 with {kind} weights here"
        raise ModelError(Problem(place, fact, fix))


def to_bitsandbytes(model: Any, place: str, fix: str) -> list[str]:
    """Puts bitsandbytes' layer in the place of each quantized one, and says so in the model's
    configuration. Returns the names of these layers; ModelError, and nothing changed, where
    transformers has no place for one."""
    named = dict(model.named_modules())
    layers = {name: each for name, each in named.items() if isinstance(each, QuantizedLinear)}
    experts = [name for name, each in named.items() if isinstance(each, NF4Experts)]
    # transformers leaves these in fp32 whatever the configuration says (T5's `wo`).
    kept = frozenset(model._keep_in_fp32_modules or ())
    wide = [name for name in layers if not kept.isdisjoint(name.split("."))]
    for names, fact in (
        (experts, "experts lie stacked in one weight, for which bitsandbytes has no layout"),
        (wide, "transformers keeps layers in fp32 that were quantized in the run"),
    ):
        if names:
            raise ModelError(Problem(place, f"{fact}: {len(names)}, first {names[0]}", fix))
    plain = [name for name, each in named.items() if type(each) is nn.Linear]
    for name, layer in layers.items():
        model.set_submodule(name, bitsandbytes_layer(layer))
    model.config.quantization_config = quantization_settings(next(iter(layers.values())), plain)
    return list(layers)


def bitsandbytes_layer(layer: QuantizedLinear) -> Any:
    """The same codes and scales, as bitsandbytes holds them."""
    own = import_bitsandbytes().nn
    sizes = (layer.in_features, layer.out_features, layer.bias is not None)
    if isinstance(layer, NF4Linear):
        made = own.Linear4bit(
            *sizes, compute_dtype=layer.compute_dtype, quant_type="nf4", device="meta"
        )
        made.weight = own.Params4bit.from_prequantized(
            layer.weight.data,
            layer.state.as_dict(packed=True),
            device=layer.weight.device,
            module=made,
        )
    else:
        assert isinstance(layer, Int8Linear)
        threshold = quantization_settings(layer, []).llm_int8_threshold
        made = own.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=threshold, device="meta")
        made.weight = own.Int8Params(
            layer.weight.data,
            requires_grad=False,
            CB=layer.weight.data,
            SCB=(INT8_STEPS * layer.scale.float()).flatten(),
        )
    made.bias = layer.bias
    return made


def quantization_settings(layer: QuantizedLinear, plain: list[str]) -> Any:
    """What `config.json` says of such layers; `plain` are the linear layers that aren't among
    them."""
    from transformers import BitsAndBytesConfig

    if isinstance(layer, Int8Linear):
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=plain)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=layer.compute_dtype,
        llm_int8_skip_modules=plain,
    )
