"""What a layer keeps for its backward pass, and what it computes once more.

Not all or nothing: a layer is run inside torch's selective checkpointing, and a rule says of each
operation whether its result is kept. Small operations are cheap to repeat and their results as
large as any other, so those are never kept; what differs is which products are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardtune.compat.torch_compiler import hide_checkpoint_warning
from shardtune.core.setup import Recompute

WIDE = 2
"""A product whose result is this many times wider than what goes in takes more memory than it is
worth: in a decoder that is what comes before an MLP's activation. In an 8 B Llama it is 61 % of all
that is kept, for half of a forward pass."""
KEEP, DROP = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
Policy = Callable[..., CheckpointPolicy]


def checkpoint_activations(layer: nn.Module, what: Recompute) -> None:
    """Lets `layer` keep what the setting says. It stays what it was, by its class's name too."""
    hide_checkpoint_warning()
    kind: Any = type(layer)
    layer.__class__ = _recomputing(kind)
    layer.rule = POLICIES[what]  # type: ignore[assignment]


class CheckpointedLayer:
    """A layer that computes some things twice."""

    rule: Policy
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = super().forward  # type: ignore[misc]
        if not self.training or not torch.is_grad_enabled():
            return inside(*args, **kwargs)
        contexts = partial(create_selective_checkpoint_contexts, self.rule)
        return checkpoint(inside, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@cache
def _recomputing(kind: type) -> type:
    return type(kind.__name__, (CheckpointedLayer, kind), {"__module__": kind.__module__})


def _attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps what attention gives: its work grows with the length, its result doesn't."""
    return KEEP if _named(op) in _ALWAYS else DROP


def _narrow(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps attention and the products that aren't wide."""
    name = _named(op)
    if name in _ALWAYS:
        return KEEP
    sizes = _PRODUCTS.get(name)
    if sizes is None:
        return DROP
    inputs, outputs = sizes(args)
    return DROP if outputs > WIDE * inputs else KEEP


def _products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps attention and every product."""
    name = _named(op)
    return KEEP if name in _ALWAYS or name in _PRODUCTS else DROP


POLICIES: dict[Recompute, Policy] = {"none": _products, "mlp": _narrow, "most": _attention}
"""`full` isn't here: transformers does that itself."""


def _named(op: Any) -> str:
    return str(op.name()).split(".")[0] if hasattr(op, "name") else str(op)


_ALWAYS = frozenset(
    {
        "aten::rsqrt",  # of a norm: a number for each row, without which rows are summed up again
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
        "shardtune::flash_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
_PRODUCTS: dict[str, Callable[[Any], tuple[int, int]]] = {
    "aten::mm": lambda args: args[1].shape,
    "aten::addmm": lambda args: args[2].shape,
    "aten::bmm": lambda args: args[1].shape[1:],
    "aten::baddbmm": lambda args: args[2].shape[1:],
    "aten::_grouped_mm": lambda args: args[1].shape[-2:],
    "shardtune::stacked_linear": lambda args: (args[2].shape[1], len(args[3][0])),
    "shardtune::stacked_linear_lora_a": lambda args: (args[0].shape[1], len(args[2][0])),
    "shardtune::rope_qkv": lambda args: (1, 1),
    "shardtune::fp8_linear": lambda args: (args[2].shape[1], len(args[4])),
    "shardtune::swiglu_lora": lambda args: (args[0].shape[1], len(args[3])),
}
"""How many numbers a row of the input and of the result has."""


def checkpoint_whole_layers(model: Any) -> None:
    """Activation checkpointing of every layer by transformers itself, which has renamed it: `full`
    in a job. The backward pass computes all of a layer once more."""
    new = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23
    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
