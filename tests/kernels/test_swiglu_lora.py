"""The activation between an MLP's products, step by step as on a CPU, against float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardtune.kernels.stacked_linear import empty_aligned
from shardtune.kernels.swiglu_lora import swiglu_lora, swiglu_lora_backward
from tests.models import exact
from tests.models.exact import distance, some

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

NEAR = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.002}


def given(
    rows: int, half: int, rank: int, next_rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`y`, `narrow`, `up`, `down`, a gradient of the result, and one that comes by `down`."""
    ups = [some((half, rank), seed) / rank**0.5 for seed in (1, 2)]
    numbers = (
        some((rows, 2 * half), 3),
        some((rows, 2 * rank), 4),
        torch.cat(ups),
        some((next_rank, half), 5) / half**0.5,
        some((rows, half), 6),
        some((rows, next_rank), 7),
    )
    y, narrow, up, down, outer, last = (each.to(dtype) for each in numbers)
    return y, narrow, up, down, outer, last


def beside(y: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    """In one piece of memory, as one product makes them."""
    both = empty_aligned(y, len(y), y.shape[1] + narrow.shape[1])
    both.copy_(torch.cat([y, narrow], dim=1))
    return both[:, : y.shape[1]], both[:, y.shape[1] :]


def assert_right(
    found: Sequence[Tensor],
    y: Tensor,
    narrow: Tensor,
    up: Tensor,
    down: Tensor,
    outer: Tensor,
    last: Tensor,
    near: float,
) -> None:
    """What both directions give, against float64."""
    own = [each.double().requires_grad_() for each in (y, narrow, up)]
    right = exact.gated(*own)
    incoming = outer.double() + last.double() @ down.double()
    to_y, to_narrow, to_up = torch.autograd.grad(right, own, incoming)
    to_down = last.double().t() @ right
    back = torch.cat([to_y, to_narrow], dim=1)
    expected = (right, right @ down.double().t(), back, to_up, to_down)
    kinds = [y.dtype] * 3 + [torch.float32] * 2
    for ours, each, kind in zip(found, expected, kinds, strict=True):
        assert ours.dtype == kind
        assert ours.isfinite().all()
        assert distance(ours, each.detach()) < near


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("shape", [(1, 7, 3, 5), (33, 40, 8, 16), (16, 32, 4, 4)], ids=str)
@pytest.mark.parametrize("joint", [False, True])
def test_as_float64(shape: tuple[int, int, int, int], joint: bool, dtype: torch.dtype) -> None:
    y, narrow, up, down, outer, last = given(*shape, dtype)
    y, narrow = beside(y, narrow) if joint else (y, narrow)
    found = (
        *swiglu_lora(y, narrow, up, down),
        *swiglu_lora_backward(outer, last, down, y, narrow, up),
    )
    assert_right(found, y, narrow, up, down, outer, last, NEAR[dtype])


@pytest.mark.usefixtures("rows_of_lines")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_compiler_is_told_is_what_comes(dtype: torch.dtype) -> None:
    y, narrow, up, down, outer, last = given(9, 8, 4, 6, dtype)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(swiglu_lora, (y, narrow, up, down), test_utils=tests)
    torch.library.opcheck(
        swiglu_lora_backward, (outer, last, down, y, narrow, up), test_utils=tests
    )
