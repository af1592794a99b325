"""The loss of some rows of logits and its gradient, against float64.

Here as it is done where there is no GPU's kernel; `tests/gpu` compares the kernel in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardtune.core.step import IGNORED
from shardtune.kernels.linear_cross_entropy import (
    _cross_entropy_over_logits,
    _cross_entropy_with_gradient,
)

SHAPES = [(1, 1), (7, 33), (5, 8193), (3, 20_000)]
"""Rows and vocabulary: less than a block of the kernel, just more than one, several."""
NEAR = {torch.float32: 1e-6, torch.bfloat16: 0.005, torch.float16: 0.001}


def given(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of very different sizes, and targets: the last token among them, some ignored."""
    draw = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocabulary, generator=draw) * torch.logspace(-1, 2, rows)[:, None]
    targets = torch.randint(0, vocabulary, (rows,), generator=draw)
    targets[0] = vocabulary - 1
    targets[2::3] = IGNORED
    return logits.to(dtype), targets


BENT = [(1.0, 0.0), (0.25, 0.0), (1.0, 30.0), (5.0, 2.0)]
"""A factor on the logits, and their soft cap."""


def right(
    logits: Tensor, targets: Tensor, factor: float = 1.0, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    exact = logits.double().requires_grad_()
    bent = exact * factor
    if cap:
        bent = torch.tanh(bent / cap) * cap
    loss = functional.cross_entropy(bent, targets, ignore_index=IGNORED, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, exact)
    return loss.detach(), gradient


def assert_right(
    score: Callable[..., tuple[Tensor, Tensor]],
    logits: Tensor,
    targets: Tensor,
    factor: float = 1.0,
    cap: float = 0.0,
) -> None:
    expected, to_logits = right(logits, targets, factor, cap)
    near = max(NEAR[logits.dtype], 1e-6 if (factor, cap) == (1.0, 0.0) else 1e-5)
    loss, gradient = score(logits.clone(), targets, factor, cap)
    assert (loss.dtype, gradient.dtype) == (torch.float32, logits.dtype)
    assert abs(loss.double() - expected) <= 1e-5 * expected + 1e-6  # logits are taken as they are
    assert (gradient.double() - to_logits).norm() <= near * to_logits.norm() + 1e-9
    assert not gradient[targets == IGNORED].any()


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for score in (_cross_entropy_with_gradient, _cross_entropy_over_logits):
        for bent in BENT:
            assert_right(score, *given(*shape, dtype), *bent)


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    logits, targets = given(4, 40, torch.bfloat16)
    _, gradient = _cross_entropy_over_logits(logits, targets)
    assert gradient is logits


def test_rows_that_are_all_ignored_have_no_loss() -> None:
    logits, targets = given(4, 40, torch.float32)
    loss, gradient = _cross_entropy_with_gradient(logits, torch.full_like(targets, IGNORED))
    assert loss == 0
    assert not gradient.any()


def test_what_is_not_finite_is_not_hidden() -> None:
    logits, targets = given(2, 40, torch.float32)
    logits[1, 3] = torch.nan
    loss, gradient = _cross_entropy_with_gradient(logits, targets)
    assert loss.isnan()
    assert gradient[0].isfinite().all()
    assert gradient[1].isnan().any()
