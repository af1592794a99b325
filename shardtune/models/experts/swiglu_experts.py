"""SwiGLU experts with LoRA of a tiny rank on both products, as one autograd function.

Beside the grouped products with frozen matrices, forward and backward, there are only those with
the factors that come first on the way (`x A^T`, and `g B` of the last product), and the gradients
of factors. All else is where numbers are read anyway: `expert_swiglu.py`, `sum_expert_rows.py`.
Matrices are asked for again in the backward pass, and not saved; with W1, W2 frozen and g the
gradient of a token:

    x = token's rows    y = x W1^T    h1 = x A1^T    a = w swiglu(y + h1 B1^T)    h2 = a A2^T
    result = sum of (a W2^T + h2 B2^T)

    dh2 = g B2    da = g W2 + dh2 A2    dx = dy W1 + dh1 A1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.model.adapter_size import RANK_MULTIPLE
from shardtune.core.model.fused_families import LARGEST_EXPERT_RANK
from shardtune.kernels.contiguous_copy import contiguous_copy
from shardtune.kernels.expert_swiglu import expert_swiglu, expert_swiglu_backward
from shardtune.kernels.sum_expert_rows import sum_expert_rows
from shardtune.models.experts.grouped_experts import (
    Factors,
    GroupedExperts,
    expert_matrices,
    grouped_matmul,
    grouped_product,
    rows_align,
)
from shardtune.models.experts.routed_rows import Routed
from shardtune.models.fused.shared_input import is_silu

GATE_UP_WEIGHT, DOWN_WEIGHT = "gate_up_proj", "down_proj"


def fuse_experts(part: nn.Module) -> None:
    """Lets grouped experts in `part` compute so, where they are plain SwiGLU."""
    from transformers.integrations import moe

    for module in part.modules():
        if not isinstance(module, GroupedExperts):
            continue
        plain = getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
        plain = plain and module.has_gate and is_silu(module)
        matrices = [getattr(module, name) for name in expert_matrices(module)]
        plain = plain and all(rows_align(each, module.compute_dtype) for each in matrices)
        if plain and not module.has_bias and not module.has_post_expert_norm:
            module.compute_fused = swiglu_experts


def swiglu_experts(
    holder: GroupedExperts,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    routed: Routed,
    factors: Factors,
) -> Tensor | None:
    """What the experts make of each token; None where their adapters aren't what this is for."""
    if GATE_UP_WEIGHT not in factors or DOWN_WEIGHT not in factors:
        return None
    if torch.compiler.is_compiling() and not hidden.is_cuda:  # it has no such products there
        return None
    ranks = [factors[name].lora_a.shape[1] for name in (GATE_UP_WEIGHT, DOWN_WEIGHT)]
    if max(ranks) > LARGEST_EXPERT_RANK:
        return None
    matrices = []
    for name in (GATE_UP_WEIGHT, DOWN_WEIGHT):
        lora_a, lora_b, scale = factors[name]
        matrices += [lora_a, scale * lora_b.transpose(-2, -1)]
    found: Tensor = _SwiGLUExperts.apply(  # type: ignore[no-untyped-call]
        hidden,
        weights.reshape(-1),
        *[_padded(each, hidden.dtype) for each in matrices],
        chosen,
        *routed[:4],
        holder,
        *ranks,
    )
    return found


def _padded(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """By expert, rank and column, with as many ranks as a grouped product takes."""
    missing = -matrix.shape[1] % RANK_MULTIPLE
    found: Tensor = contiguous_copy(functional.pad(matrix.to(dtype), (0, 0, 0, missing)))
    return found


class _SwiGLUExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        first_a: Tensor,
        first_b: Tensor,
        last_a: Tensor,
        last_b: Tensor,
        chosen: Tensor,
        experts: Tensor,
        ends: Tensor,
        order: Tensor,
        places: Tensor,
        holder: GroupedExperts,
        rank: int,
        last_rank: int,
    ) -> Tensor:
        rows = hidden[order // chosen.shape[1]]
        y = grouped_matmul(rows, holder.matrix(GATE_UP_WEIGHT), ends)
        first_hidden = grouped_matmul(rows, first_a, ends)
        inner = expert_swiglu(y, first_hidden, first_b, weights[order], experts, rank)
        results = grouped_matmul(inner, holder.matrix(DOWN_WEIGHT), ends)
        last_hidden = grouped_matmul(inner, last_a, ends)
        ctx.save_for_backward(
            hidden, weights, first_a, first_b, last_a, last_b, y, first_hidden, last_hidden,
            chosen, experts, ends, order, places,
        )  # fmt: skip
        ctx.holder, ctx.rank, ctx.last_rank = holder, rank, last_rank
        found: Tensor = sum_expert_rows(results, last_hidden, last_b, places, chosen, last_rank)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (
            hidden, weights, first_a, first_b, last_a, last_b, y, first_hidden, last_hidden,
            chosen, experts, ends, order, places,
        ) = ctx.saved_tensors  # fmt: skip
        holder, token = ctx.holder, order // chosen.shape[1]
        gradient = gradients[0][token]
        grad_last_hidden = grouped_matmul(gradient, last_b, ends)
        grad_last_b = grouped_product(last_hidden.t(), gradient, ends)
        grad_inner = grouped_product(
            gradient, holder.matrix_for_backward(DOWN_WEIGHT, gradient), ends
        )
        grad_y, grad_first_hidden, grad_weights, inner = expert_swiglu_backward(
            grad_inner, grad_last_hidden, last_a, y, first_hidden, first_b,
            weights[order], experts, ctx.rank, ctx.last_rank,
        )  # fmt: skip
        grad_last_a = grouped_product(grad_last_hidden.t(), inner, ends)
        grad_first_b = grouped_product(first_hidden.t(), grad_y, ends)
        grad_rows = grouped_product(
            grad_y, holder.matrix_for_backward(GATE_UP_WEIGHT, grad_y), ends
        )
        grad_first_a = grouped_product(grad_first_hidden.t(), hidden[token], ends)
        grad_hidden = sum_expert_rows(
            grad_rows, grad_first_hidden, first_a, places, chosen, ctx.rank
        )
        grad_weights = grad_weights[places].to(weights.dtype)
        found = (grad_hidden, grad_weights, grad_first_a, grad_first_b, grad_last_a, grad_last_b)
        return (*found, *(None,) * 8)
