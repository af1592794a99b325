"""Lets 8-bit layers hear what goes into them, before they are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from shardtune.core.eight_bits import ROOM, square
from shardtune.models.fp8 import FP8Linear

Texts = Sequence[Sequence[int]]
"""Token ids."""


def in_turn(layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Decoder layers, as many at a time as there is room to listen to, but one at least."""
    group: list[nn.Module] = []
    taken = 0
    for layer in layers:
        size = sum(square(each.in_features) for each in holders(layer))
        if group and taken + size > ROOM:
            yield group
            group, taken = [], 0
        group.append(layer)
        taken += size
    yield group


def holders(part: nn.Module) -> list[FP8Linear]:
    """The layers that hold 8-bit weights, their own or those of several."""
    found = [module for module in part.modules() if isinstance(module, FP8Linear)]
    return [module for module in found if module.whole is module]


class _Enough(Exception):
    """Ends a forward pass."""


@torch.no_grad()
def hear(
    model: Any, group: Sequence[nn.Module], texts: Texts, device: str, compute: torch.dtype
) -> None:
    """Runs `texts` through a model that has its weights, one after the other, as far as to the end
    of the `group` that listens. Adapters add nothing yet."""
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    listening = [layer for part in group for layer in holders(part)]
    for layer in listening:
        layer.listen()

    def stop(*_: Any) -> None:
        raise _Enough

    handle = group[-1].register_forward_hook(stop)
    # Each text has a length of its own, for which nothing is to be compiled.
    eager = torch.compiler.set_stance("force_eager")
    try:
        with eager, torch.autocast(torch.device(device).type, compute):
            for text in texts:
                ids = torch.tensor([list(text)], device=device)
                with suppress(_Enough):
                    causal.base_model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
