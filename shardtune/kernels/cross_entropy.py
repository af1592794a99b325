"""Cross-entropy with its gradient written over the logits, on a GPU.

    loss = logsumexp(z) - z[target]        dz = softmax(z) - onehot(target)

Online softmax: one pass keeps the running maximum m and sum l, rescaled when the maximum grows
(m' = max(m, max z), l' = l * exp(m - m') + sum exp(z - m')); the second pass writes exp(z - m - log
l) over z while the row is still in the cache. A compiler needs a second buffer as large as the
logits and passes over memory three times. Families that bend their logits x first have

    z = cap * tanh(factor * x / cap)        dx = dz * factor * (1 - (z / cap)^2)
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardtune.core.step import IGNORED
from shardtune.kernels.triton_import import jit, tl, triton

_BLOCK = 8192


def available() -> bool:
    return triton is not None


def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, factor: float = 1.0, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The summed loss, and the gradient, in the place of `logits`; `cap` 0 is none."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    _cross_entropy[(rows,)](
        logits, targets, losses, logits.stride(0), vocabulary, factor, cap or 1.0,
        IGNORED, _BLOCK, factor != 1.0, cap != 0.0, num_warps=16,
    )  # fmt: skip
    return losses.sum(), logits


def _bent_logits(x, factor, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    if SCALED:
        x = x * factor
    if CAPPED:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
    return x


_bent = jit(_bent_logits)


def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, targets, losses, stride, vocabulary, factor, cap,
    ignored: tl.constexpr, block: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, block)
    largest = float("-inf")
    total = 0.0
    for begin in range(0, vocabulary, block):
        inside = begin + columns < vocabulary
        x = tl.load(row_logits + begin + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if SCALED or CAPPED:  # what is outside stays without weight
            x = tl.where(inside, _bent(x, factor, cap, SCALED, CAPPED), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), 0)
        largest = new_largest
    log_sum_exp = largest + tl.log(total)
    counted = target != ignored
    safe_target = tl.where(counted, target, 0)
    target_logit = tl.load(
        row_logits + safe_target, mask=safe_target < vocabulary, other=float("nan")
    ).to(tl.float32)
    target_logit = _bent(target_logit, factor, cap, SCALED, CAPPED)
    tl.store(losses + row, tl.where(counted, log_sum_exp - target_logit, 0.0))
    tl.debug_barrier()  # `target_logit` has been read: it may be overwritten
    for begin in range(0, vocabulary, block):
        inside = begin + columns < vocabulary
        x = tl.load(row_logits + begin + columns, mask=inside, other=0.0).to(tl.float32)
        x = _bent(x, factor, cap, SCALED, CAPPED)
        gradient = tl.exp(x - log_sum_exp) - tl.where(begin + columns == target, 1.0, 0.0)
        if SCALED:
            gradient = gradient * factor
        if CAPPED:
            gradient = gradient * (1 - (x / cap) * (x / cap))
        gradient = tl.where(counted, gradient, 0.0)
        tl.store(row_logits + begin + columns, gradient.to(logits.dtype.element_ty), mask=inside)


_cross_entropy = jit(_cross_entropy_kernel)
