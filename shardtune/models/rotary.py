"""Queries and keys turned by their positions, from the one product that made them.

Forward it is the usual few operations, which a compiler joins well. Backward three gradients have
to be turned back and put side by side, and what a compiler makes of that asks of each number whose
it is: on an H200 it reaches less than half of the memory's speed. Here it is a kernel, which has a
token at a time. On other machines the same is done step by step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None

TURN = "apply_rotary_pos_emb"
"""What transformers calls it, in each family's own code."""


class Turned(torch.autograd.Function):
    """Queries, keys and values by head, the first two turned. `joint` has them side by side."""

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        wide, (rows, length, _) = cos.shape[-1], joint.shape
        parts = torch.split(joint, [count * wide for count in heads], -1)
        queries, keys, values = (part.view(rows, length, -1, wide) for part in parts)
        return _turn(queries, cos, sin), _turn(keys, cos, sin), values.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return turned_back(*gradients, *ctx.saved_tensors), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers does it: a number and the one half a head away are a point in the plane."""
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


@torch.library.custom_op("shardtune::turned_back", mutates_args=())
def turned_back(
    to_queries: Tensor, to_keys: Tensor, to_values: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """The gradient of what `Turned` was given, in its precision, which values have kept. Those that
    come in may lie in memory as they like, head by head or token by token."""
    rows, length, heads, wide = to_queries.shape
    groups = to_keys.shape[2]
    parts = (to_queries, to_keys, to_values)
    powers_of_two = wide & (wide - 1) == 0
    if triton is None or not to_queries.is_cuda or not powers_of_two:
        turned = [_back(part, cos, sin) for part in parts[:2]]
        side_by_side = [part.flatten(2).to(to_values.dtype) for part in (*turned, to_values)]
        return torch.cat(side_by_side, dim=-1)
    result = to_values.new_empty(rows, length, (heads + 2 * groups) * wide)
    angles = [each.expand(rows, -1, -1).contiguous() for each in (cos, sin)]
    dense = [part if part.stride(3) == 1 else part.contiguous() for part in parts]
    _back_by_token[(rows * length,)](
        *dense, *angles, result, length, heads, groups,
        *(size for part in dense for size in part.stride()[:3]),
        wide, triton.next_power_of_2(heads), triton.next_power_of_2(groups), num_warps=8,
    )  # fmt: skip
    return result


@turned_back.register_fake
def _(to_queries: Tensor, to_keys: Tensor, to_values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rows, length, heads, wide = to_queries.shape
    return to_values.new_empty(rows, length, (heads + 2 * to_keys.shape[2]) * wide)


def _back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = (gradient * sin.unsqueeze(-2)).chunk(2, dim=-1)
    return gradient * cos.unsqueeze(-2) + torch.cat([right, -left], dim=-1)


def leave_turned(module: str) -> bool:
    """Lets the code of a family leave alone what comes without angles: it is turned already.
    False if the family has no such code."""
    code: Any = sys.modules[module]
    own = getattr(code, TURN, None)
    if own is None:
        return False
    if not getattr(own, "leaves_turned", False):
        setattr(code, TURN, _leaving(own))
    return True


def _leaving(turn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(turn)
    def unless_turned(q: Tensor, k: Tensor, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
        return (q, k) if cos is None else turn(q, k, cos, sin, *more, **named)

    unless_turned.leaves_turned = True  # type: ignore[attr-defined]
    return unless_turned


def _token_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, cos, sin, result, length, heads, groups,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    D: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
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
    there = result + token * (heads + 2 * groups) * D + d

    here = queries + row * q_row + place * q_token + h * q_head + d
    _turn_heads(here, there + h * D, many, half, cos_left, cos_right, sin_left, sin_right)
    there += heads * D
    here = keys + row * k_row + place * k_token + g * k_head + d
    _turn_heads(here, there + g * D, few, half, cos_left, cos_right, sin_left, sin_right)
    there += groups * D
    here = values + row * v_row + place * v_token + g * v_head + d
    tl.store(there + g * D, tl.load(here, mask=few, other=0.0), mask=few)
    tl.store(there + g * D + half, tl.load(here + half, mask=few, other=0.0), mask=few)


def _heads_kernel(  # type: ignore[no-untyped-def]
    here, there, inside, half: tl.constexpr, cos_left, cos_right, sin_left, sin_right
):
    """Some heads of one token, turned back."""
    kind = there.dtype.element_ty
    left = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(here + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(there, (left * cos_left + right * sin_right).to(kind), mask=inside)
    tl.store(there + half, (right * cos_right - left * sin_left).to(kind), mask=inside)


_turn_heads: Any = triton.jit(_heads_kernel) if triton is not None else None
_back_by_token: Any = triton.jit(_token_kernel) if triton is not None else None
