"""ZeRO-3's leaf modules: those whose weights are gathered, and their gradients sent, all together.

Stage 3 gathers the weights of each module in a hook of its own, and remembers the order. Ranks that
call modules unequally often would wait for each other's gathers forever. In a leaf module only its
own hooks run, once a pass, whatever is called inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardtune.engine.uneven_calls import UnevenCalls


def gather_around_uneven_calls(model: nn.Module) -> None:
    """Before DeepSpeed hangs its hooks into `model`."""
    from deepspeed.utils import set_z3_leaf_module

    for module in model.modules():
        if isinstance(module, UnevenCalls):
            set_z3_leaf_module(module, True)
            module.register_forward_pre_hook(_give_input_gradient, with_kwargs=True)


def _give_input_gradient(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    """DeepSpeed sends the gradients of a leaf module when that of its input is known, and looks at
    positional inputs alone. Without one it would send zeros before they are computed, so an input
    that needs no gradient (of the first layer beside LoRA) gets one."""
    hidden: Tensor
    hidden, *others = given or (named.pop("hidden_states"),)
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *others), named
