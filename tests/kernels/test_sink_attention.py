"""Attention with sinks is what a softmax with one more column gives, forward and backward."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from shardtune.kernels.sink_attention import sink_attention

TOKENS, HEADS, GROUPS, DIM = 24, 4, 2, 8
SCALE = 0.3


def with_a_column_more(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, seen: Tensor
) -> Tensor:
    """As transformers' gpt-oss writes it: the sink is a column, which is dropped again."""
    wide_key, wide_value = (
        each.transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0) for each in (key, value)
    )
    scores = query.transpose(0, 1) @ wide_key.transpose(1, 2) * SCALE
    scores = scores.masked_fill(~seen, float("-inf"))
    column = sinks[:, None, None].expand(-1, len(query), 1)
    shares = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (shares @ wide_value).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 5])
def test_it_is_a_softmax_with_a_column_more(window: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    given = [torch.randn(s, generator=draw).requires_grad_() for s in (*shapes, (HEADS,))]
    ends = torch.tensor([0, 9, TOKENS, TOKENS], dtype=torch.int32)  # the last one has no tokens
    place = torch.arange(TOKENS)
    seen = (place[:, None] >= place) & ((place[:, None] < 9) == (place < 9))
    if window is not None:
        seen &= place[:, None] - place < window
    found = cast(Tensor, sink_attention(*given, ends, TOKENS, SCALE, window)[0])
    expected = with_a_column_more(*given, seen)
    assert torch.allclose(found, expected, atol=1e-6)
    gradient = torch.randn(expected.shape, generator=draw)
    ours = torch.autograd.grad(found, given, gradient)
    right = torch.autograd.grad(expected, given, gradient)
    for one, other in zip(ours, right, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
