"""Queries and keys turned by their positions, and their gradients put together again."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from shardtune.compat.transformers_rope import APPLY_ROPE, skip_if_rotated
from shardtune.kernels.rope import rope_qkv, rope_qkv_backward
from tests.models.exact import distance, some

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

NEAR = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}
Order = Literal["token", "head"]
"""In which order gradients lie in memory."""
ROWS, LENGTH = 2, 5


def angles(wide: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    turn = some((rows, LENGTH, wide // 2), 7).repeat(1, 1, 2)
    return turn.cos().to(dtype), turn.sin().to(dtype)


def as_transformers(
    joint: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]
) -> tuple[Tensor, ...]:
    wide = cos.shape[-1]
    parts = joint.split([count * wide for count in heads], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, wide)).transpose(1, 2) for part in parts)
    rope_qkv = (*modeling_llama.apply_rotary_pos_emb(q, k, cos, sin), v)
    return tuple(part.transpose(1, 2) for part in rope_qkv)


def assert_turned(
    heads: tuple[int, int],
    wide: int,
    dtype: torch.dtype,
    device: str,
    by: Order,
    rows: int = ROWS,
) -> None:
    counts = (heads[0], heads[1], heads[1])
    given = some((ROWS, LENGTH, sum(counts) * wide), 1).to(dtype).to(device)
    cos, sin = (each.to(device) for each in angles(wide, dtype, rows))
    found = rope_qkv(given, cos, sin, counts)
    exact = given.double().requires_grad_()
    expected = as_transformers(exact, cos.double(), sin.double(), counts)
    outer = [some(part.shape, n).to(dtype).to(device) for n, part in enumerate(expected)]
    if by == "head":
        outer = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in outer]
    up = (some((given.shape[-1], 8), 3) / given.shape[-1] ** 0.5).to(dtype).to(device)
    back = rope_qkv_backward(*outer, cos, sin, up)
    (right,) = torch.autograd.grad(expected, exact, [each.double() for each in outer])
    right = right.flatten(0, 1)
    right = torch.cat([right, right @ up.double()], dim=1)
    for ours, each in zip((*found, back), (*expected, right), strict=True):
        assert ours.dtype == dtype
        assert distance(ours.detach(), each.detach()) < NEAR[dtype]


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(("heads", "wide"), [((4, 4), 8), ((6, 2), 16), ((3, 1), 12)], ids=str)
@pytest.mark.parametrize("by", ["token", "head"])
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_as_transformers_in_float64(
    heads: tuple[int, int], wide: int, dtype: torch.dtype, by: Order, rows: int
) -> None:
    assert_turned(heads, wide, dtype, "cpu", by, rows)


@pytest.mark.usefixtures("rows_of_lines")
def test_what_a_compiler_is_told_is_what_comes() -> None:
    cos, sin = angles(8, torch.float32)
    q, k, v = (some((ROWS, LENGTH, count, 8), count) for count in (4, 2, 2))
    tests = ("test_schema", "test_faketensor")
    up, joint = some((64, 6), 1), some((ROWS, LENGTH, 64), 2)
    torch.library.opcheck(rope_qkv, (joint, cos, sin, (4, 2, 2)), test_utils=tests)
    torch.library.opcheck(rope_qkv_backward, (q, k, v, cos, sin, up), test_utils=tests)


def test_a_family_leaves_alone_what_comes_without_angles() -> None:
    assert skip_if_rotated(modeling_llama.__name__)
    once = getattr(modeling_llama, APPLY_ROPE)
    assert skip_if_rotated(modeling_llama.__name__)
    assert getattr(modeling_llama, APPLY_ROPE) is once  # not a second time
    q, k = some((1, 2, 3, 8), 0), some((1, 1, 3, 8), 1)
    assert once(q, k, None, None) == (q, k)
    cos, sin = (each[:, :3] for each in angles(8, torch.float32, 1))
    rotated, _ = once(q, k, cos, sin)
    assert not torch.equal(rotated, q)
    assert not skip_if_rotated("shardtune.kernels.rope")
