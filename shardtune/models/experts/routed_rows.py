"""Tokens as rows sorted by expert, and back: gathers in both directions.

A token has a row for each expert that it is sent to. autograd's own backward pass of a gather adds
rows up one by one, by atomics or after another sort. Here it is known which rows a token has, so
each direction is the backward pass of the other: a gather, or a gather and a sum. Nothing waits for
the host: how many rows an expert gets stays on the GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routed(NamedTuple):
    """Rows sorted by the expert that they are sent to."""

    experts: Tensor
    """Of each row."""
    ends: Tensor
    """Behind the last row of each expert."""
    order: Tensor
    """Where each row was before, tokens one after the other."""
    places: Tensor
    """Where it is now: the inverse of `order`."""
    chosen: int
    """Rows of a token."""


def route(top_k_index: Tensor, num_experts: int) -> Routed:
    """Sorts what a router has chosen, (tokens, experts of each)."""
    chosen = top_k_index.shape[1]
    narrow = top_k_index.reshape(-1).to(torch.int16)  # which a GPU sorts in half the time
    experts, order = torch.sort(narrow)
    bounds = torch.arange(num_experts, device=experts.device, dtype=torch.int16)
    ends = torch.searchsorted(experts, bounds, right=True).to(torch.int32)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return Routed(experts.long(), ends, order, places, chosen)


def to_rows(hidden: Tensor, routed: Routed) -> Tensor:
    """A row of each token for each of its experts."""
    rows: Tensor = _ToRows.apply(hidden, routed.order, routed.places, routed.chosen)  # type: ignore[no-untyped-call]
    return rows


def to_tokens(rows: Tensor, routed: Routed) -> Tensor:
    """The sum of each token's rows."""
    found: Tensor = _ToTokens.apply(rows, routed.order, routed.places, routed.chosen)  # type: ignore[no-untyped-call]
    return found


def to_row_order(values: Tensor, routed: Routed) -> Tensor:
    """A number for each row, given token by token, in the order of the rows."""
    found: Tensor = _Permuted.apply(values, routed.order, routed.places)  # type: ignore[no-untyped-call]
    return found


def _sum_rows(rows: Tensor, places: Tensor, chosen: int) -> Tensor:
    # A sum of 16-bit numbers is computed in fp32.
    return rows[places].view(-1, chosen, rows.shape[1]).sum(1)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, places: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.chosen = chosen
        return hidden[order // chosen]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return _sum_rows(gradients[0], places, ctx.chosen), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.chosen = chosen
        return _sum_rows(rows, places, chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0][order // ctx.chosen], None, None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return values[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None
