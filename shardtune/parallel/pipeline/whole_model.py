"""Lets a model whose layers lie on several ranks answer as one, when all of them ask.

Every rank runs the whole forward pass of transformers. Where a layer isn't its own it does nothing
but wait at the end of the stage for what the owner found. So texts are generated, logits compared
and packing checked by code that knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtune.parallel.pipeline.stage import Anatomy, Division


class Relay:
    """Hooks on the borders of stages. They rest while a schedule runs the stages one by one."""

    def __init__(
        self,
        anatomy: Anatomy,
        division: Division,
        group: dist.ProcessGroup,
        rank: int,
        flowing: torch.dtype,
    ) -> None:
        """`flowing` is what hidden states are in."""
        self._group, self._flowing = group, flowing
        self._open = True
        for module in division.absent(anatomy, rank):
            # The module keeps its name and its shapes, so that it can be saved by them.
            module.forward = _elsewhere(anatomy, module, flowing)
        for layers, owner in zip(division.layers, division.ranks, strict=True):
            self._pass_on(anatomy.layers[layers[-1]], owner)
        self._pass_on(anatomy.head, division.ranks[-1])

    @contextmanager
    def resting(self) -> Iterator[None]:
        self._open = False
        try:
            yield
        finally:
            self._open = True

    def _pass_on(self, module: nn.Module, owner: int) -> None:
        """What `module` gives on its owner is what it gives on every rank."""

        def hook(module: nn.Module, given: Any, found: Tensor) -> Tensor:
            if not self._open:
                return found
            # The owner's precision may be another where autocast has a say; all need the same.
            found = found.detach().to(self._flowing).contiguous()
            dist.broadcast(found, group=self._group, group_src=owner)
            return found

        module.register_forward_hook(hook)


def _elsewhere(anatomy: Anatomy, module: nn.Module, flowing: torch.dtype) -> Callable[..., Tensor]:
    """The forward pass of a module that another rank has: something of the right shape."""
    if module in anatomy.embeddings:
        width = anatomy.hidden
        return lambda ids: torch.zeros(*ids.shape, width, dtype=flowing, device=ids.device)
    if module is anatomy.head:
        words = next(module.parameters()).shape[0]
        return lambda hidden: hidden.new_zeros(*hidden.shape[:-1], words)
    if module is anatomy.norm:
        return lambda hidden: hidden
    index = anatomy.layers.index(module)

    def layer(hidden: Tensor, *given: Any, **named: Any) -> Tensor:
        # A cache counts tokens by the first layer's entries: it gets thin ones.
        for cache in (*given, *named.values()):
            if hasattr(cache, "get_seq_length"):
                thin = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
                cache.update(thin, thin, index)
        return hidden

    return layer
