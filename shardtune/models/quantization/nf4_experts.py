"""Experts in NF4: the fused weights of a layer's experts, packed and dequantized for each product.

A weight becomes a parameter of whole bytes, one row for each expert, which FSDP2 and ZeRO-3 shard
like any other. Its scales, a thirtieth of the whole, are not sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.engine.dtensor import local
from shardtune.models.experts.grouped_experts import GroupedExperts, become
from shardtune.models.quantization.bitsandbytes_linear import (
    for_backward,
    pack_nf4,
    restore_nf4,
    rows_of_nf4,
)


class NF4Experts(GroupedExperts):
    """Grouped experts whose matrices are packed in NF4, as `NF4Linear` packs one."""

    states: dict[str, Any]
    """bitsandbytes' scales of each weight."""
    skipped: dict[str, int]
    """Of these scales the first ones, which belong to other ranks' experts."""

    def quantize(self, name: str, weight: Tensor) -> None:
        """Packs the matrices of all experts, on their device."""
        packed, self.states[name] = pack_nf4(weight.to(self.compute_dtype))
        self._parameters[name] = nn.Parameter(packed.view(len(weight), -1), requires_grad=False)

    def keep_experts(self, first: int, count: int) -> None:
        """Lets go of the scales of all experts but `count` of them, from the `first` on; whoever
        divides experts over ranks has cut the packed weights themselves."""
        for name, state in self.states.items():
            self.states[name], self.skipped[name] = rows_of_nf4(state, first, count)

    def matrix(self, name: str) -> Tensor:
        return self._restored(name, local(getattr(self, name)), self.states[name].absmax)

    def matrix_for_backward(self, name: str, gradient: Tensor) -> Tensor:
        packed, scales = local(getattr(self, name)), self.states[name].absmax
        return self._restored(name, for_backward(packed, gradient), for_backward(scales, gradient))

    def _restored(self, name: str, packed: Tensor, scales: Tensor) -> Tensor:
        skipped = self.skipped.get(name, 0)
        found = restore_nf4(packed.view(-1, 1), scales, self.states[name], skipped)
        return found.transpose(-2, -1) if self.is_transposed else found

    def unpack(self) -> None:
        """Makes it the plain module again, with the weights that it has multiplied with."""
        for name, state in self.states.items():
            found = restore_nf4(getattr(self, name).view(-1, 1), state.absmax, state)
            self._parameters[name] = nn.Parameter(found, requires_grad=False)
        self.__class__ = self.plain_class  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, state in self.states.items():
            state.to(getattr(self, name).device)
        return self


def pack_experts(module: Any, compute_dtype: torch.dtype) -> None:
    """Lets a module of frozen experts hold its matrices in NF4 as soon as it is given them."""
    become(module, NF4Experts, compute_dtype)
    module.states = {}
    module.skipped = {}


@contextmanager
def shown_unpacked(model: nn.Module) -> Iterator[None]:
    """Lets peft see packed experts in the shape that their weights have: it looks at it when it
    puts an adapter beside them. What it sees takes no memory, and has no values."""
    experts = [module for module in model.modules() if isinstance(module, NF4Experts)]
    packed = [(each, name, each._parameters[name]) for each in experts for name in each.states]
    for module, name, weight in packed:
        assert weight is not None
        empty = torch.empty(1, dtype=module.compute_dtype, device=weight.device)
        shape = module.states[name].shape
        module._parameters[name] = nn.Parameter(empty.expand(shape), requires_grad=False)
    try:
        yield
    finally:
        for module, name, weight in packed:
            module._parameters[name] = weight
