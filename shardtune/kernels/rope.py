"""RoPE applied while the stacked QKV projection is split into heads, and its inverse in the
backward.

    q' = q * cos + rotate_half(q) * sin        rotate_half([l, r]) = [-r, l]
    backward (the transposed rotation):  dq = dq' * cos + [dq'_r * sin_r, -dq'_l * sin_l]

The outputs are what attention's backward saves anyway, so the projection itself isn't saved. In the
backward pass three gradients go side by side into one matrix; what a compiler makes of that
concatenation reaches less than half of the memory's bandwidth on an H200. Here each direction is
one kernel that reads and writes every number once, a program for each token. Elsewhere than on a
GPU the same is done step by step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtune.kernels.stacked_linear import cat_aligned, empty_aligned
from shardtune.kernels.triton_import import jit, tl, triton


@torch.library.custom_op("shardtune::rope_qkv", mutates_args=())
def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """RoPE on queries and keys, split by head: `[rows, length, (q + k + v) * dim]` to three tensors
    `[rows, length, heads, dim]`; values are copied."""
    head_dim, (rows, length, _) = cos.shape[-1], qkv.shape
    queries, keys, values = outputs = _empty_heads(qkv, cos, heads)
    if _on_gpu(qkv, head_dim):
        _launch_rope_qkv(
            outputs, qkv.contiguous().view(rows * length, -1), cos, sin, backward=False
        )
    else:
        split = torch.split(qkv, [count * head_dim for count in heads], -1)
        parts = [part.reshape(rows, length, -1, head_dim) for part in split]
        queries.copy_(_rotate(parts[0], cos, sin))
        keys.copy_(_rotate(parts[1], cos, sin))
        values.copy_(parts[2])
    return queries, keys, values


@rope_qkv.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = _empty_heads(qkv, cos, heads)
    return queries, keys, values


def _empty_heads(qkv: Tensor, cos: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """Empty outputs for queries, keys and values. Values keep their dtype."""
    qk_dtype = torch.result_type(qkv, cos)
    kinds = (qk_dtype, qk_dtype, qkv.dtype)
    rows, length, _ = qkv.shape
    return [
        qkv.new_empty(rows, length, count, cos.shape[-1], dtype=kind)
        for count, kind in zip(heads, kinds, strict=True)
    ]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin`, as transformers does it."""
    left, right = x.chunk(2, dim=-1)
    aside = torch.cat([-right, left], dim=-1)
    return x * cos.unsqueeze(-2) + aside * sin.unsqueeze(-2)


@torch.library.custom_op("shardtune::rope_qkv_backward", mutates_args=())
def rope_qkv_backward(
    grad_queries: Tensor,
    grad_keys: Tensor,
    grad_values: Tensor,
    cos: Tensor,
    sin: Tensor,
    lora_b: Tensor,
) -> Tensor:
    """RoPE's backward: the gradient of `qkv`, a row for each token, and beside it its product with
    `lora_b` (LoRA's dh = g B). In the dtype of values. Incoming gradients may have any strides."""
    rows, length, _, head_dim = grad_queries.shape
    parts = [grad_queries, grad_keys, grad_values]
    if not _on_gpu(grad_queries, head_dim):
        parts[:2] = [_rotate_back(part, cos, sin) for part in parts[:2]]
        qkv = torch.cat([part.flatten(2) for part in parts], dim=-1).to(grad_values.dtype)
        qkv = qkv.view(rows * length, -1)
        return cat_aligned(qkv, qkv @ lora_b)
    result = empty_aligned(grad_values, rows * length, sum(lora_b.shape))
    qkv, lora_hidden = torch.split(result, list(lora_b.shape), dim=1)
    dense = [part if part.stride(3) == 1 else part.contiguous() for part in parts]
    _launch_rope_qkv(dense, qkv, cos, sin, backward=True)
    torch.mm(qkv, lora_b, out=lora_hidden)
    return result


@rope_qkv_backward.register_fake
def _(
    grad_queries: Tensor,
    grad_keys: Tensor,
    grad_values: Tensor,
    cos: Tensor,
    sin: Tensor,
    lora_b: Tensor,
) -> Tensor:
    return empty_aligned(
        grad_values, grad_queries.shape[0] * grad_queries.shape[1], sum(lora_b.shape)
    )


def _rotate_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = (gradient * sin.unsqueeze(-2)).chunk(2, dim=-1)
    return gradient * cos.unsqueeze(-2) + torch.cat([right, -left], dim=-1)


def _on_gpu(x: Tensor, head_dim: int) -> bool:
    return triton is not None and x.is_cuda and head_dim % 2 == 0


def _launch_rope_qkv(
    parts: list[Tensor], qkv: Tensor, cos: Tensor, sin: Tensor, *, backward: bool
) -> None:
    """The kernel: from `qkv` to `parts`, or `backward`."""
    rows, length, heads, head_dim = parts[0].shape
    kv_heads = parts[1].shape[2]
    angles = [each.expand(rows, -1, -1).contiguous() for each in (cos, sin)]
    _rope_qkv[(rows * length,)](
        *parts, qkv, *angles, length, heads, kv_heads, qkv.stride(0),
        *(size for part in parts for size in part.stride()[:3]), backward,
        head_dim, triton.next_power_of_2(head_dim // 2), triton.next_power_of_2(heads),
        triton.next_power_of_2(kv_heads), num_warps=8,
    )  # fmt: skip


def _rope_qkv_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, qkv, cos, sin, length, heads, kv_heads, qkv_row,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    backward: tl.constexpr, D: tl.constexpr, P: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The heads of one token. A half of a head is padded to P numbers, a power of two."""
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    half: tl.constexpr = D // 2
    d = tl.arange(0, P)[None, :]
    in_head = d < half
    angle = token * D + d
    cos_left = tl.load(cos + angle, mask=in_head, other=0.0).to(tl.float32)
    cos_right = tl.load(cos + angle + half, mask=in_head, other=0.0).to(tl.float32)
    sin_left = tl.load(sin + angle, mask=in_head, other=0.0).to(tl.float32)
    sin_right = tl.load(sin + angle + half, mask=in_head, other=0.0).to(tl.float32)
    h, g = tl.arange(0, H)[:, None].to(tl.int64), tl.arange(0, G)[:, None].to(tl.int64)
    many, few = (h < heads) & in_head, (g < kv_heads) & in_head
    queries += row * q_row + place * q_token + h * q_head + d
    keys += row * k_row + place * k_token + g * k_head + d
    values += row * v_row + place * v_token + g * v_head + d
    qkv += token * qkv_row + d
    of_queries = qkv + h * D
    of_keys = qkv + heads * D + g * D
    of_values = qkv + (heads + kv_heads) * D + g * D
    if backward:
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
    """Rotates some heads of one token: each half is a mix of both."""
    kind = there.dtype.element_ty
    left = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(here + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(there, (left * left_left + right * left_right).to(kind), mask=inside)
    tl.store(there + half, (right * right_right + left * right_left).to(kind), mask=inside)


_rotate_heads = jit(_rotate_heads_kernel)
_rope_qkv = jit(_rope_qkv_kernel)
