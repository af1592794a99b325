"""All-to-all dispatch and combine: tokens go to the ranks of their experts, and results come back.

Rows are sorted by expert first, so that those of a rank stand together. One small all-to-all tells
how many rows each expert gets; then the rows themselves are sent, computed and sent back. A rank
weights and sums the results of its own tokens, so that the router's gradient never leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LocalExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows, the expert and the weight of each choice of a row: the weighted sum of its results."""


def through_experts(
    experts: LocalExperts,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    count: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """What the experts of all ranks make of this rank's tokens. `experts` are those of this rank,
    numbered from zero; `count` is that of all of them. Every rank has to ask."""
    tokens, choices = chosen.shape
    ranks = dist.get_world_size(group)
    order = torch.argsort(chosen.reshape(-1), stable=True)
    sent = torch.bincount(chosen.reshape(-1), minlength=count).view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    out, come = sent.sum(1).tolist(), received.sum(1).tolist()  # the host waits for the counts here
    rows = _Exchange.apply(hidden[order // choices], out, come, group)  # type: ignore[no-untyped-call]
    mine = torch.arange(received.shape[1], device=hidden.device).repeat(ranks)
    found = _computed(experts, rows, mine.repeat_interleave(received.reshape(-1)))
    back: Tensor = _Exchange.apply(found, come, out, group)  # type: ignore[no-untyped-call]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    weighted = back[places].view(tokens, choices, -1) * weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)


def _computed(experts: LocalExperts, rows: Tensor, numbers: Tensor) -> Tensor:
    """Each row through its expert. Where no token has come one of zeros is computed and left out,
    so that every rank has a gradient."""
    none = not len(rows)
    if none:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        numbers = numbers.new_zeros(1)
    found = experts(rows, numbers.unsqueeze(1), rows.new_ones(len(rows), 1))
    return found[:0] if none else found


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that want them; the backward pass sends their gradients home."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, out: list[int], come: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.out, ctx.come, ctx.group = out, come, group
        return _exchange(rows, out, come, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.come, ctx.out, ctx.group), None, None, None


def _exchange(rows: Tensor, out: list[int], come: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(come), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), come, out, group=group)
    return found
