"""Experts in NF4: the fused weights of a layer's experts, packed and dequantized for each product.

A weight becomes a parameter of whole bytes, one row for each expert, which FSDP2 and ZeRO-3 shard
like any other. Its scales, a thirtieth of the whole, are not sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.engine.dtensor import local
from shardtune.models.experts.grouped_experts import become
from shardtune.models.quantization.bitsandbytes_linear import (
    for_backward,
    pack_nf4,
    restore_nf4,
    rows_of_nf4,
)
from shardtune.models.quantization.quantized_experts import QuantizedExperts


class NF4Experts(QuantizedExperts):
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

    def dequantize(self, name: str) -> Tensor:
        state = self.states[name]
        return restore_nf4(getattr(self, name).view(-1, 1), state.absmax, state)

    def plain_shape(self, name: str) -> torch.Size:
        return torch.Size(self.states[name].shape)

    def quantized(self) -> tuple[str, ...]:
        return tuple(self.states)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, state in self.states.items():
            state.to(getattr(self, name).device)
        return self


def hold_in_nf4(module: Any, compute_dtype: torch.dtype) -> None:
    """Lets a module of frozen experts hold its matrices in NF4 as soon as it is given them."""
    become(module, NF4Experts, compute_dtype)
    module.states = {}
    module.skipped = {}
