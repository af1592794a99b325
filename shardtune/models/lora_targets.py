"""Which linear layers of a model LoRA adapts, where peft's own `all-linear` isn't the answer.

Of a mixture of experts peft would add the experts of some families, of their own rank, and the
router. Of a Mamba-2 layer it would take the last projection, whose weight the fused kernels read
past any adapter. Of a model that sees it would take the encoder of pictures, which text never goes
through.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from torch import nn

from shardtune.engine.text_part import modules_beside_text
from shardtune.errors import ModelError, Problem
from shardtune.models.expert_layers import (
    expert_weights,
    modules_of_routers,
    names_taken_by_peft,
)

Targets = Literal["all-linear"] | tuple[str, ...]

_FUSED_OUTPUT = frozenset(
    {"bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "mamba2", "nemotron_h",
     "zamba2"}
)  # fmt: skip
"""Families whose kernels multiply with the weight of `out_proj` themselves."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, also GPT-2's transposed one."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def lora_target_modules(model: Any, targets: Targets) -> str | list[str]:
    """As peft is told them; refuses names whose adapter would go elsewhere or nowhere."""
    family = model.config.get_text_config().model_type
    lost = {"out_proj"} if family in _FUSED_OUTPUT else set()
    taken = names_taken_by_peft(model) if expert_weights(model) else frozenset()
    if targets != "all-linear":
        _refuse(targets, taken, "peft takes these names for the experts of this family",
                "leave them out, and set adapter.experts: all to adapt the experts")  # fmt: skip
        _refuse(targets, lost, "kernels of Mamba read this weight past an adapter", "leave it out")
        return list(targets)
    beside = never_adapted(model, named=False)
    if not lost and not beside and not expert_weights(model):
        return targets
    head, routers = model.get_output_embeddings(), modules_of_routers(model)
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    left_out = {name for name, each in linears.items() if each is head or each in routers}
    # Zamba 2 has linear layers called "0", as are layers of the decoder.
    others = {leaf_name(name) for name, _ in model.named_modules() if name not in linears}
    ambiguous = others | {leaf_name(name) for name in left_out}
    found = [name for name in linears if name not in left_out]
    found = [name for name in found if not (beside and re.fullmatch(beside, name))]
    found = [name for name in found if leaf_name(name) not in taken | lost]
    return sorted({name if leaf_name(name) in ambiguous else leaf_name(name) for name in found})


def never_adapted(model: nn.Module, *, named: bool) -> str | None:
    """A pattern of modules, as peft's `exclude_modules`, that are adapted only if the job has
    `named` layers: their linear layers may be called as those of the decoder are."""
    beside = [] if named else modules_beside_text(model)
    return rf"({'|'.join(map(re.escape, beside))})(\..*)?" if beside else None


def leaf_name(name: str) -> str:
    """The last part of a module's name."""
    return name.rpartition(".")[2]


def _refuse(targets: tuple[str, ...], names: frozenset[str] | set[str], why: str, fix: str) -> None:
    if found := sorted({leaf_name(name) for name in targets} & names):
        raise ModelError(Problem("adapter.targets", f"{', '.join(found)}: {why}", fix))
