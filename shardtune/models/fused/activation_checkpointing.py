"""Selective activation checkpointing: what a layer saves for its backward pass, and what it
recomputes.

Not all or nothing: a layer runs inside torch's selective checkpointing, and a policy says of each
op whether its output is saved. Pointwise ops are cheap to repeat and their outputs as large as any
other, so those are always recomputed; the levels differ in which matmuls are saved.

    none: all matmuls and attention      mlp: not those before an MLP's activation
    most: attention alone                full: nothing (transformers does that itself)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardtune.compat.torch_compiler import hide_checkpoint_warning
from shardtune.core.model.activation_memory import WIDE_MATMUL
from shardtune.core.setup import Recompute

NARROW = 16
"""Columns up to which a grouped product is saved at every level."""
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
Policy = Callable[..., CheckpointPolicy]


def checkpoint_activations(layer: nn.Module, level: Recompute) -> None:
    """Lets `layer` save what the level says. It keeps its class's name."""
    hide_checkpoint_warning()
    kind: Any = type(layer)
    layer.__class__ = _checkpointed_class(kind)
    layer.policy = POLICIES[level]  # type: ignore[assignment]
    biased = any(getattr(part, "has_bias", False) for part in layer.modules())
    layer.overwritten = OVERWRITTEN | ({"aten::_grouped_mm"} if biased else set())  # type: ignore[assignment]


OVERWRITTEN = frozenset({"aten::topk"})
"""Ops whose results transformers' mixtures change in place: routers scale their largest weights to
a sum of one. Experts with biases (`has_bias`) add them to grouped products."""


class CheckpointedLayer:
    """A layer that runs inside `torch.utils.checkpoint` with a policy."""

    policy: Policy
    overwritten: frozenset[str]
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inside = super().forward  # type: ignore[misc]
        if not self.training or not torch.is_grad_enabled():
            return inside(*args, **kwargs)
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        if not torch.compiler.is_compiling():  # a compiler changes nothing in place
            contexts = partial(_eager_contexts, self.policy, self.overwritten)
        return checkpoint(inside, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands on copies of what is saved of some ops, so that it stays as it is."""

    def __init__(self, policy: Policy, ops: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy, self._ops = policy, ops

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = op(*args, **given)
        if _op_name(op) in self._ops and self._policy(None, op, *args, **given) is SAVE:
            return tree_map_only(Tensor, torch.clone, result)
        return result


def _eager_contexts(
    policy: Policy, overwritten: frozenset[str]
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """torch refuses what was changed in place after it has been saved."""
    saving, using = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return _with_copies(saving, _Copies(policy, overwritten)), using


@contextmanager
def _with_copies(saving: Any, copies: _Copies) -> Iterator[None]:
    with saving, copies:
        yield


@cache
def _checkpointed_class(kind: type) -> type:
    return type(kind.__name__, (CheckpointedLayer, kind), {"__module__": kind.__module__})


def _save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves attention's output: its work grows with the length, its output doesn't. And what lies
    between two factors of experts' adapters: a few numbers for a row."""
    name = _op_name(op)
    narrow = name == "aten::_grouped_mm" and args[1].shape[-1] <= NARROW
    return SAVE if narrow or name in _ATTENTION_OPS else RECOMPUTE


def _save_narrow_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves attention and the matmuls that don't widen."""
    name = _op_name(op)
    if name in _ATTENTION_OPS:
        return SAVE
    sizes = _MATMULS.get(name)
    if sizes is None:
        return RECOMPUTE
    inputs, outputs = sizes(args)
    return RECOMPUTE if outputs > WIDE_MATMUL * inputs else SAVE


def _save_all_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves attention and every matmul."""
    name = _op_name(op)
    return SAVE if name in _ATTENTION_OPS or name in _MATMULS else RECOMPUTE


POLICIES: dict[Recompute, Policy] = {
    "none": _save_all_matmuls,
    "mlp": _save_narrow_matmuls,
    "most": _save_attention,
}
"""`full` isn't here: transformers does that itself."""


def _op_name(op: Any) -> str:
    return str(op.name()).split(".")[0] if hasattr(op, "name") else str(op)


_ATTENTION_OPS = frozenset(
    {
        "shardtune::dropout_seed",  # a second one would be another
        "shardtune::dora_row_norms",  # a number for each row of weights
        "aten::sort",  # of rows by expert: another order would be another gradient
        "aten::topk",  # a router's choice, likewise
        "aten::rsqrt",  # of a norm: a number for each row, without which rows are reduced again
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
        "shardtune::flash_attention",
        "shardtune::sink_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
_MATMULS: dict[str, Callable[[Any], tuple[int, int]]] = {
    "aten::mm": lambda args: args[1].shape,
    "aten::addmm": lambda args: args[2].shape,
    "aten::bmm": lambda args: args[1].shape[1:],
    "aten::baddbmm": lambda args: args[2].shape[1:],
    "aten::_grouped_mm": lambda args: args[1].shape[-2:],
    "shardtune::stacked_linear": lambda args: (args[2].shape[1], len(args[3][0])),
    "shardtune::stacked_linear_lora_a": lambda args: (args[0].shape[1], len(args[2][0])),
    "shardtune::dropout_lora_a": lambda args: (1, 1),
    "shardtune::rope_qkv": lambda args: (1, 1),
    "shardtune::fp8_linear": lambda args: (args[2].shape[1], len(args[4])),
    "shardtune::swiglu_lora": lambda args: (args[0].shape[1], len(args[3])),
}
"""Widths of input and output of each matmul."""


def checkpoint_whole_layers(model: Any) -> None:
    """Activation checkpointing of every layer by transformers itself, which has renamed it: `full`
    in a job. The backward pass computes all of a layer once more."""
    new = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23
    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
