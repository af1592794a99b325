"""What lies between the grouped products of experts, against float64. The GPU's kernels are held
against the same in tests/gpu/test_expert_kernels.py."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardtune.kernels.expert_swiglu import expert_swiglu, expert_swiglu_backward
from shardtune.kernels.sum_expert_rows import sum_expert_rows
from tests.models.exact import distance, some

EXPERTS = 5
SHAPES = [(1, 16, 1, 8), (37, 200, 4, 8), (64, 256, 8, 8), (131, 768, 3, 16)]
"""Rows, half of the columns, ranks in use, ranks there is room for: one row, tiles and a bit, whole
tiles, room that isn't used."""
TOKENS = [(1, 1, 40), (29, 4, 1000), (64, 8, 2048)]
"""Tokens, experts of each, columns."""
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.002}


class Rows(NamedTuple):
    """What goes into SwiGLU with LoRA, and comes back to it."""

    y: Tensor
    hidden: Tensor
    matrices: Tensor
    weights: Tensor
    experts: Tensor
    gradient: Tensor
    grad_next: Tensor
    next_matrices: Tensor


def rows_of(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> Rows:
    rows, half, rank, room = shape
    used = (torch.arange(room) < rank).float()
    draw = torch.Generator().manual_seed(rows)
    experts = torch.randint(EXPERTS, (rows,), generator=draw).sort().values
    drawn = (
        some((rows, 2 * half), 0),
        some((rows, room), 1) * used,
        some((EXPERTS, room, 2 * half), 2) * used[:, None],
        some((rows,), 3).sigmoid(),
        some((rows, half), 4),
        some((rows, room), 5) * used,
        some((EXPERTS, room, half), 6) * used[:, None],
    )
    numbers = [each.to(device, dtype) for each in drawn]
    return Rows(*numbers[:4], experts.to(device), *numbers[4:])


def assert_gated(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """Forward, backward, and the result once more, to the accuracy of `dtype`."""
    given, rank = rows_of(shape, dtype, device), shape[2]
    forward = given[:5]
    found = (
        expert_swiglu(*forward, rank),
        *expert_swiglu_backward(
            given.gradient, given.grad_next, given.next_matrices, *forward, rank, rank
        ),
    )
    y, hidden, weights = (
        each.double().requires_grad_() for each in (given.y, given.hidden, given.weights)
    )
    matrices, following = given.matrices.double(), given.next_matrices.double()
    gate, up = (y + torch.einsum("nr,nrc->nc", hidden, matrices[given.experts])).chunk(2, dim=1)
    value = gate * gate.sigmoid() * up * weights[:, None]
    back = given.gradient.double() + torch.einsum(
        "nr,nrc->nc", given.grad_next.double(), following[given.experts]
    )
    gradients = torch.autograd.grad(value, (y, hidden, weights), back)
    for one, right in zip(found, (value, *gradients, value), strict=True):
        assert distance(one, right.detach()) < NEAR[dtype]
    # What nobody uses is nothing: a grouped product behind it reads the room as a whole.
    assert not found[2][:, rank:].any()


def assert_summed(shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    tokens, count, width = shape
    rank, room = 4, 8
    draw = torch.Generator().manual_seed(tokens)
    chosen = torch.stack(
        [torch.randperm(max(EXPERTS, count), generator=draw)[:count] for _ in range(tokens)]
    )
    order = chosen.reshape(-1).argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    rows, hidden, matrices = (
        each.to(device, dtype)
        for each in (
            some((tokens * count, width), 0),
            some((tokens * count, room), 1),
            some((max(EXPERTS, count), room, width), 2),
        )
    )
    places, chosen = places.to(device), chosen.to(device)
    found = sum_expert_rows(rows, hidden, matrices, places, chosen, rank)
    used = matrices.double()[chosen.reshape(-1), :rank]
    corrected = rows.double()[places]
    corrected = corrected + torch.einsum("nr,nrc->nc", hidden.double()[places, :rank], used)
    assert distance(found, corrected.view(tokens, count, width).sum(1)) < NEAR[dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_as_float64(shape: tuple[int, int, int, int]) -> None:
    assert_gated(shape, torch.float32)


@pytest.mark.parametrize("shape", TOKENS, ids=str)
def test_summed_as_float64(shape: tuple[int, int, int]) -> None:
    assert_summed(shape, torch.float32)
