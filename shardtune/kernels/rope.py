"""Queries and keys turned by their positions, from the one product that made them.

What comes out is what attention's backward pass needs, so it is kept, and the product isn't; and
nothing is turned twice. Back, three gradients have to be put side by side, and what a compiler
makes of that asks of each number whose it is: on an H200 it reaches less than half of the memory's
speed. Here both ways are a kernel, which has a token at a time. On other machines the same is done
step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.stacked_linear import cat_aligned, empty_aligned

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None


@torch.library.custom_op("shardtune::rope_qkv", mutates_args=())
def rope_qkv(
    joint: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by head, the first two turned. `joint` has them side by side."""
    wide, (rows, length, _) = cos.shape[-1], joint.shape
    queries, keys, values = places = _by_head(joint, cos, heads)
    if _on_gpu(joint, wide):
        _token_by_token(places, joint.contiguous().view(rows * length, -1), cos, sin, back=False)
    else:
        split = torch.split(joint, [count * wide for count in heads], -1)
        parts = [part.reshape(rows, length, -1, wide) for part in split]
        queries.copy_(_rotate(parts[0], cos, sin))
        keys.copy_(_rotate(parts[1], cos, sin))
        values.copy_(parts[2])
    return queries, keys, values


@rope_qkv.register_fake
def _(
    joint: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = _by_head(joint, cos, heads)
    return queries, keys, values


def _by_head(joint: Tensor, cos: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """Where queries, keys and values come. Values keep their precision."""
    finer = torch.result_type(joint, cos)
    kinds = (finer, finer, joint.dtype)
    rows, length, _ = joint.shape
    return [
        joint.new_empty(rows, length, count, cos.shape[-1], dtype=kind)
        for count, kind in zip(heads, kinds, strict=True)
    ]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers does it: a number and the one half a head away are a point in the plane."""
    left, right = x.chunk(2, dim=-1)
    aside = torch.cat([-right, left], dim=-1)
    return x * cos.unsqueeze(-2) + aside * sin.unsqueeze(-2)


@torch.library.custom_op("shardtune::rope_qkv_backward", mutates_args=())
def rope_qkv_backward(
    to_queries: Tensor, to_keys: Tensor, to_values: Tensor, cos: Tensor, sin: Tensor, up: Tensor
) -> Tensor:
    """The gradient of `rope_qkv`'s input, a row for each token, and beside it what `up` makes of
    that. In the precision that values have kept. Gradients that come in may lie in memory as
    they like, head by head or token by token."""
    rows, length, _, wide = to_queries.shape
    parts = [to_queries, to_keys, to_values]
    if not _on_gpu(to_queries, wide):
        parts[:2] = [_rotate_back(part, cos, sin) for part in parts[:2]]
        joint = torch.cat([part.flatten(2) for part in parts], dim=-1).to(to_values.dtype)
        joint = joint.view(rows * length, -1)
        return cat_aligned(joint, joint @ up)
    result = empty_aligned(to_values, rows * length, sum(up.shape))
    joint, narrow = torch.split(result, list(up.shape), dim=1)
    dense = [part if part.stride(3) == 1 else part.contiguous() for part in parts]
    _token_by_token(dense, joint, cos, sin, back=True)
    torch.mm(joint, up, out=narrow)
    return result


@rope_qkv_backward.register_fake
def _(
    to_queries: Tensor, to_keys: Tensor, to_values: Tensor, cos: Tensor, sin: Tensor, up: Tensor
) -> Tensor:
    return empty_aligned(to_values, to_queries.shape[0] * to_queries.shape[1], sum(up.shape))


def _rotate_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = (gradient * sin.unsqueeze(-2)).chunk(2, dim=-1)
    return gradient * cos.unsqueeze(-2) + torch.cat([right, -left], dim=-1)


def _on_gpu(x: Tensor, wide: int) -> bool:
    return triton is not None and x.is_cuda and wide & (wide - 1) == 0


def _token_by_token(
    parts: list[Tensor], joint: Tensor, cos: Tensor, sin: Tensor, *, back: bool
) -> None:
    """Turns `joint` into `parts`, or `back`."""
    rows, length, heads, wide = parts[0].shape
    groups = parts[1].shape[2]
    angles = [each.expand(rows, -1, -1).contiguous() for each in (cos, sin)]
    _rope_qkv[(rows * length,)](
        *parts, joint, *angles, length, heads, groups, joint.stride(0),
        *(size for part in parts for size in part.stride()[:3]), back,
        wide, triton.next_power_of_2(heads), triton.next_power_of_2(groups), num_warps=8,
    )  # fmt: skip


def _rope_qkv_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, joint, cos, sin, length, heads, groups, joint_row,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    back: tl.constexpr, D: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    half: tl.constexpr = D // 2
    d = tl.arange(0, half)[None, :]
    angle = token * D + d
    cos_left = tl.load(cos + angle).to(tl.float32)
    cos_right = tl.load(cos + angle + half).to(tl.float32)
    sin_left = tl.load(sin + angle).to(tl.float32)
    sin_right = tl.load(sin + angle + half).to(tl.float32)
    h, g = tl.arange(0, H)[:, None].to(tl.int64), tl.arange(0, G)[:, None].to(tl.int64)
    many, few = h < heads, g < groups
    queries += row * q_row + place * q_token + h * q_head + d
    keys += row * k_row + place * k_token + g * k_head + d
    values += row * v_row + place * v_token + g * v_head + d
    joint += token * joint_row + d
    of_queries = joint + h * D
    of_keys = joint + heads * D + g * D
    of_values = joint + (heads + groups) * D + g * D
    if back:
        _rotate_heads(queries, of_queries, many, half, cos_left, cos_right, sin_right, -sin_left)
        _rotate_heads(keys, of_keys, few, half, cos_left, cos_right, sin_right, -sin_left)
        _rotate_heads(values, of_values, few, half, 1.0, 1.0, 0.0, 0.0)
    else:
        _rotate_heads(of_queries, queries, many, half, cos_left, cos_right, -sin_left, sin_right)
        _rotate_heads(of_keys, keys, few, half, cos_left, cos_right, -sin_left, sin_right)
        _rotate_heads(of_values, values, few, half, 1.0, 1.0, 0.0, 0.0)


def _rotate_heads_kernel(  # type: ignore[no-untyped-def]
    here, there, inside, half: tl.constexpr, left_left, right_right, left_right, right_left
):
    """Some heads of one token. A half is made of itself and the other one."""
    kind = there.dtype.element_ty
    left = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(here + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(there, (left * left_left + right * left_right).to(kind), mask=inside)
    tl.store(there + half, (right * right_right + left * right_left).to(kind), mask=inside)


_rotate_heads: Any = triton.jit(_rotate_heads_kernel) if triton is not None else None
_rope_qkv: Any = triton.jit(_rope_qkv_kernel) if triton is not None else None
