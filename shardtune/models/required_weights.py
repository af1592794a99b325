"""Whole models only: every weight that the architecture has comes from the files, and is a number.

transformers draws a weight that the files lack at random, with a warning, and goes on. That is how
a classifier gets its new head; a language model that is to be fine-tuned has no such weights. What
the job adds itself (adapters, new tokens) comes later and is not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.known_models import MODEL_NAME
from shardtune.errors import ModelError, Problem
from shardtune.models.fused_weights import own_names

OTHER_WEIGHTS = "use the weights that belong to its config.json"

_PART = 1 << 24  # numbers that are widened at once

LEFTOVER_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|position_ids|attn\.masked_bias|attn\.bias|attention\.masked_bias|"
    r"attention\.bias)$"
)
"""Tables that older versions of transformers saved with a model, and newer ones compute."""


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter: several where it is shared."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)
    return list(groups.values())


def missing_weights(model: Any, tensors: Iterable[str]) -> list[str]:
    """The weights of a model, its tied ones tied, that no tensor of the files fills.

    Nothing where weights are cut out of larger tensors: then only loading them shows.
    """
    written, fused, split = own_names(model, tensors)
    if split:
        return []
    present = written.keys() | fused.keys()
    computed = model._keys_to_ignore_on_load_missing or ()
    return [
        group[0]
        for group in shared_names(model)
        if present.isdisjoint(group) and not any(re.search(each, group[0]) for each in computed)
    ]


def refuse_missing(name: str, missing: Sequence[str]) -> None:
    """ModelError with the names, where there are any."""
    if missing:
        fact = f"{len(missing)} weights of {name!r} are missing: {some_names(missing)}"
        raise ModelError(Problem(MODEL_NAME, fact, OTHER_WEIGHTS))


def require_finite(name: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses a model that holds NaN or infinity; one pass over its weights."""
    broken = [each for each, tensor in weights if not is_finite(tensor)]
    if broken:
        fact = f"{len(broken)} of the weights of {name!r} hold NaN or infinity: "
        fact += some_names(broken)
        fix = "fetch or make the model again; fp16 can't hold numbers beyond 65,504, bf16 can"
        raise ModelError(Problem(MODEL_NAME, fact, fix))


def is_finite(tensor: Tensor) -> bool:
    """Whether all its numbers are; what has no numbers is taken for good."""
    if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # 8-bit floating point has no `aminmax`
        return all(is_finite(part.float()) for part in torch.split(tensor.flatten(), _PART))
    least, most = tensor.aminmax()  # NaN passes through both, and no mask is made
    return bool(least.isfinite() & most.isfinite())


def some_names(names: Sequence[str], shown: int = 8) -> str:
    """The first of them, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
