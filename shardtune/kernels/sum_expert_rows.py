"""The rows of each token, added up where experts have left them, with LoRA's second product on the
way: forward the results of a layer's experts, backward the gradients of their input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.triton_import import jit, tl, triton

_COLUMNS = 1024
"""Of a program."""


@torch.library.custom_op("shardtune::sum_expert_rows", mutates_args=())
def sum_expert_rows(
    rows: Tensor, hidden: Tensor, matrices: Tensor, places: Tensor, chosen: Tensor, rank: int
) -> Tensor:
    """`sum over a token's experts e of row + h M_e`. `chosen` are the experts of each token,
    `(tokens, experts)`; `places` says where the row of each is. `hidden` has a row's numbers
    between two factors, `matrices` the second factor by expert, rank and column."""
    tokens, count = chosen.shape
    width = rows.shape[1]
    if not _on_gpu(rows):
        corrected = rows.float()[places]
        for each in range(rank):
            small = hidden[places, each, None].float()
            corrected = corrected + small * matrices[chosen.reshape(-1), each].float()
        return corrected.view(tokens, count, width).sum(1).to(rows.dtype)
    found = rows.new_empty(tokens, width)
    _kernel[(tokens, triton.cdiv(width, _COLUMNS))](
        rows, hidden, matrices, places, chosen, found, width,
        hidden.shape[1], count, rank, _COLUMNS,
    )  # fmt: skip
    return found


@sum_expert_rows.register_fake
def _(
    rows: Tensor, hidden: Tensor, matrices: Tensor, places: Tensor, chosen: Tensor, *_: Any
) -> Tensor:
    return rows.new_empty(chosen.shape[0], rows.shape[1])


def _on_gpu(rows: Tensor) -> bool:
    return rows.is_cuda and triton is not None


def _kernel_of(  # type: ignore[no-untyped-def]
    rows, hidden, matrices, places, chosen, found, width,
    P: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A token and BN columns."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = c < width
    total = tl.zeros((BN,), dtype=tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k)
        expert = tl.load(chosen + token * K + k)
        total += tl.load(rows + place * width + c, mask=inside, other=0.0).to(tl.float32)
        for r in tl.static_range(R):
            small = tl.load(hidden + place * P + r).to(tl.float32)
            matrix = matrices + (expert * P + r) * width
            total += small * tl.load(matrix + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + token * width + c, total.to(found.dtype.element_ty), mask=inside)


_kernel = jit(_kernel_of)
