"""SwiGLU between the grouped products of experts, with LoRA on both sides and the router's weights:
one kernel forward, one backward.

Rows are sorted by expert. Ranks of experts are tiny, so LoRA's second product is a few
multiplications beside each number that is read anyway; as a product of its own it would write and
read all of them once more. `y` holds gate and up side by side, without LoRA. Factors are laid out
by expert, rank and column; numbers between two factors by row and rank, with room for
`len(matrices[0])` ranks, of which `rank` are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardtune.kernels.triton_import import jit, tl, triton

_ROWS, _BACKWARD_ROWS, _COLUMNS = 16, 8, 256
"""Of a program's tile."""


@torch.library.custom_op("shardtune::expert_swiglu", mutates_args=())
def expert_swiglu(
    y: Tensor, hidden: Tensor, matrices: Tensor, weights: Tensor, experts: Tensor, rank: int
) -> Tensor:
    """`w * silu(gate) * up` of each row, where `[gate | up] = y + h B^T` with its expert's B."""
    rows, half = len(y), y.shape[1] // 2
    if not _on_gpu(y):
        gate, up = _gate_up(y, hidden, matrices, experts, rank)
        return (functional.silu(gate) * up * weights.float()[:, None]).to(y.dtype)
    found = y.new_empty(rows, half)
    _forward[(triton.cdiv(rows, _ROWS), triton.cdiv(half, _COLUMNS))](
        y, hidden, matrices, weights, experts, found, rows, half,
        hidden.shape[1], rank, _ROWS, _COLUMNS,
    )  # fmt: skip
    return found


@expert_swiglu.register_fake
def _(y: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape[0], y.shape[1] // 2)


@torch.library.custom_op("shardtune::expert_swiglu_backward", mutates_args=())
def expert_swiglu_backward(
    gradient: Tensor,
    grad_next: Tensor,
    next_matrices: Tensor,
    y: Tensor,
    hidden: Tensor,
    matrices: Tensor,
    weights: Tensor,
    experts: Tensor,
    rank: int,
    next_rank: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, of `hidden` and of the weights, and the result once more. `gradient` is
    without what comes back through the next layer's A (`next_matrices`), of which `grad_next` has
    what lies between its factors."""
    rows, half = gradient.shape
    if not _on_gpu(y):
        return _backward_step_by_step(
            gradient, grad_next, next_matrices, y, hidden, matrices, weights, experts, rank
        )
    grad_y, found = torch.empty_like(y), torch.empty_like(gradient)
    grad_hidden = torch.empty_like(hidden)
    grad_weights = weights.new_empty(rows, dtype=torch.float32)
    _backward[(triton.cdiv(rows, _BACKWARD_ROWS),)](
        gradient, grad_next, next_matrices, y, hidden, matrices, weights, experts,
        grad_y, grad_hidden, grad_weights, found, rows, half,
        hidden.shape[1], rank, next_rank, _BACKWARD_ROWS, _COLUMNS,
    )  # fmt: skip
    return grad_y, grad_hidden, grad_weights, found


@expert_swiglu_backward.register_fake
def _(
    gradient: Tensor,
    grad_next: Tensor,
    next_matrices: Tensor,
    y: Tensor,
    hidden: Tensor,
    matrices: Tensor,
    weights: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_weights = weights.new_empty(weights.shape, dtype=torch.float32)
    return torch.empty_like(y), torch.empty_like(hidden), grad_weights, torch.empty_like(gradient)


def _on_gpu(y: Tensor) -> bool:
    return y.is_cuda and triton is not None


def _gate_up(
    y: Tensor, hidden: Tensor, matrices: Tensor, experts: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    whole = y.float()
    for each in range(rank):
        whole = whole + hidden[:, each, None].float() * matrices[experts, each].float()
    gate, up = whole.chunk(2, dim=1)
    return gate, up


def _backward_step_by_step(
    gradient: Tensor,
    grad_next: Tensor,
    next_matrices: Tensor,
    y: Tensor,
    hidden: Tensor,
    matrices: Tensor,
    weights: Tensor,
    experts: Tensor,
    rank: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate, up = _gate_up(y, hidden, matrices, experts, rank)
    whole = gradient.float()
    whole = whole + (grad_next.float()[:, :, None] * next_matrices[experts].float()).sum(1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    found = silu * up
    grad_weights = (whole * found).sum(1)
    whole = whole * weights.float()[:, None]
    grad_y = torch.cat([whole * up * (sigmoid + silu * (1 - sigmoid)), whole * silu], dim=1)
    grad_hidden = (grad_y[:, None, :] * matrices[experts].float()).sum(2)
    result = (found * weights.float()[:, None]).to(y.dtype)
    return grad_y.to(y.dtype), grad_hidden.to(hidden.dtype), grad_weights, result


def _forward_kernel(  # type: ignore[no-untyped-def]
    y, hidden, matrices, weights, experts, found, rows, half,
    P: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM rows and BN columns."""
    begin = tl.program_id(0).to(tl.int64) * BM
    m = tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    here = m < rows - begin
    inside = here[:, None] & (c < half)[None, :]
    expert = tl.load(experts + begin + m, mask=here, other=0)
    weight = tl.load(weights + begin + m, mask=here, other=0.0).to(tl.float32)
    tile = y + begin * (2 * half) + (m[:, None] * (2 * half) + c[None, :])
    gate = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(tile + half, mask=inside, other=0.0).to(tl.float32)
    matrix = matrices + expert[:, None] * (P * 2 * half) + c[None, :]
    for r in tl.static_range(R):
        h = tl.load(hidden + (begin + m) * P + r, mask=here, other=0.0).to(tl.float32)
        some = matrix + r * 2 * half
        gate += h[:, None] * tl.load(some, mask=inside, other=0.0).to(tl.float32)
        up += h[:, None] * tl.load(some + half, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up * weight[:, None]
    place = found + begin * half + (m[:, None] * half + c[None, :])
    tl.store(place, value.to(found.dtype.element_ty), mask=inside)


def _backward_kernel(  # type: ignore[no-untyped-def]
    gradient, grad_next, next_matrices, y, hidden, matrices, weights, experts,
    grad_y, grad_hidden, grad_weights, found, rows, half,
    P: tl.constexpr, R: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM whole rows: what is summed over columns is summed here."""
    begin = tl.program_id(0).to(tl.int64) * BM
    m, p = tl.arange(0, BM), tl.arange(0, P)
    here = m < rows - begin
    expert = tl.load(experts + begin + m, mask=here, other=0)
    weight = tl.load(weights + begin + m, mask=here, other=0.0).to(tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    sums = tl.zeros((BM, P), dtype=tl.float32)
    kind = grad_y.dtype.element_ty
    for first in range(0, half, BN):
        c = first + tl.arange(0, BN)
        inside = here[:, None] & (c < half)[None, :]
        tile = begin * (2 * half) + (m[:, None] * (2 * half) + c[None, :])
        short = begin * half + (m[:, None] * half + c[None, :])
        gate = tl.load(y + tile, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(y + half + tile, mask=inside, other=0.0).to(tl.float32)
        whole = tl.load(gradient + short, mask=inside, other=0.0).to(tl.float32)
        matrix = matrices + expert[:, None] * (P * 2 * half) + c[None, :]
        next_matrix = next_matrices + expert[:, None] * (P * half) + c[None, :]
        for r in tl.static_range(R):
            h = tl.load(hidden + (begin + m) * P + r, mask=here, other=0.0).to(tl.float32)
            some = matrix + r * 2 * half
            gate += h[:, None] * tl.load(some, mask=inside, other=0.0).to(tl.float32)
            up += h[:, None] * tl.load(some + half, mask=inside, other=0.0).to(tl.float32)
        for r in tl.static_range(N):
            h = tl.load(grad_next + (begin + m) * P + r, mask=here, other=0.0).to(tl.float32)
            some = next_matrix + r * half
            whole += h[:, None] * tl.load(some, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        value = silu * up
        total += tl.sum(whole * value, axis=1)
        tl.store(found + short, (value * weight[:, None]).to(kind), mask=inside)
        whole = whole * weight[:, None]
        grad_gate = whole * up * (sigmoid + silu * (1 - sigmoid))
        grad_up = whole * silu
        tl.store(grad_y + tile, grad_gate.to(kind), mask=inside)
        tl.store(grad_y + half + tile, grad_up.to(kind), mask=inside)
        for r in tl.static_range(R):
            some = matrix + r * 2 * half
            one = tl.load(some, mask=inside, other=0.0).to(tl.float32)
            other = tl.load(some + half, mask=inside, other=0.0).to(tl.float32)
            share = tl.sum(grad_gate * one + grad_up * other, axis=1)
            sums += tl.where(p[None, :] == r, share[:, None], 0.0)
    tl.store(grad_weights + begin + m, total, mask=here)
    place = grad_hidden + begin * P + (m[:, None] * P + p[None, :])
    tl.store(place, sums.to(kind), mask=here[:, None])


_forward, _backward = jit(_forward_kernel), jit(_backward_kernel)
