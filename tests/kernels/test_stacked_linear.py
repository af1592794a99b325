"""Frozen weights that stand together in memory, and what is found there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardtune.kernels.lora_residual import add_lora_residual
from shardtune.kernels.stacked_linear import (
    spare_rows,
    stack_weights,
    stacked_linear,
    stacked_linear_backward,
    stacked_linear_lora_a,
)
from tests.models.exact import distance, some
from tests.models.test_lora_autograd import NEAR, ROWS, WIDE, linear

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

SIZES = (8, 4, 4)
ROOM = 6


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was multiplied since, by name."""
    called: list[str] = []

    def counting(name: str) -> Any:
        real = getattr(torch, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        return counted

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, counting(name))
    return called


def layers(room: int | None) -> tuple[Any, ...]:
    made = tuple(linear(size, WIDE, n, torch.float32) for n, size in enumerate(SIZES))
    if room is not None:
        stack_weights(made, room)
    return made


def weights_of(made: tuple[Any, ...]) -> list[Tensor]:
    return [layer.weight for layer in made]


def test_they_stay_what_they_were() -> None:
    apart, together = layers(None), layers(ROOM)
    for was, now in zip(apart, together, strict=True):
        assert torch.equal(was.weight, now.weight)
        assert now.weight.is_contiguous()
    assert (spare_rows(apart), spare_rows(together)) == (0, ROOM)
    first = together[0].weight.untyped_storage()
    assert all(each.weight.untyped_storage().data_ptr() == first.data_ptr() for each in together)


@pytest.mark.parametrize(("room", "count"), [(None, 3), (0, 1), (ROOM, 1)])
def test_one_product_instead_of_three(room: int | None, count: int, products: list[str]) -> None:
    made = layers(room)
    x, gradient = some((ROWS, WIDE), 5), some((ROWS, sum(SIZES)), 6)
    whole = torch.cat(weights_of(made))
    assert distance(stacked_linear(None, None, x, weights_of(made)), x @ whole.t()) < 1e-6
    assert len(products) == count
    assert (
        distance(stacked_linear_backward(None, None, gradient, weights_of(made)), gradient @ whole)
        < 1e-6
    )
    assert len(products) == 2 * count


@pytest.mark.parametrize(("rank", "count"), [(ROOM, 1), (4, 1), (ROOM + 1, 4)])
def test_the_small_product_comes_along_where_there_is_room(
    rank: int, count: int, products: list[str]
) -> None:
    made, x, down = layers(ROOM), some((ROWS, WIDE), 5), some((rank, WIDE), 6)
    both = torch.cat([*weights_of(made), down])
    for matrix in (both, torch.cat([both[: sum(SIZES)], 2 * down])):  # after a step it is another
        products.clear()
        y = stacked_linear_lora_a(x, matrix[sum(SIZES) :], weights_of(made), spare_rows(made))
        assert len(products) == count
        assert distance(y, x @ matrix.t()) < 1e-6
        gradient = some((ROWS, len(matrix)), 7)
        back = stacked_linear_backward(None, matrix[sum(SIZES) :], gradient, weights_of(made), ROOM)
        assert distance(back, gradient @ matrix) < 1e-6


def test_memory_that_belongs_to_others_is_not_written() -> None:
    """As when an engine has gathered all weights of a layer into one piece."""
    piece = some((sum(SIZES) + ROOM + 3, WIDE), 1)
    before = piece.clone()
    x, down = some((ROWS, WIDE), 5), some((ROOM, WIDE), 6)
    for begin in (0, 3):
        weights = list(piece[begin : begin + sum(SIZES)].split(SIZES))
        y = stacked_linear_lora_a(x, down, weights, ROOM)
        assert distance(y, x @ torch.cat([*weights, down]).t()) < 1e-6
        stacked_linear_backward(None, down, y, weights, ROOM)
        assert torch.equal(piece, before)


def test_weights_in_another_order_are_not_taken_for_one() -> None:
    made = layers(0)[::-1]
    x = some((ROWS, WIDE), 5)
    expected = x @ torch.cat(weights_of(made)).t()
    assert distance(stacked_linear(None, None, x, weights_of(made)), expected) < 1e-6


def test_autograd_sees_no_other_weights() -> None:
    made, x, down = layers(ROOM), some((ROWS, WIDE), 5), some((ROOM, WIDE), 6)
    before = [weight._version for weight in weights_of(made)]
    stacked_linear_lora_a(x, down, weights_of(made), ROOM)
    assert [weight._version for weight in weights_of(made)] == before


@pytest.mark.parametrize("dtype", NEAR)
def test_a_product_completed(dtype: torch.dtype) -> None:
    shapes = [(ROWS, WIDE), (ROWS, 4), (WIDE, 4), (ROWS, WIDE)]
    y, narrow, up, past = (some(shape, seed).to(dtype) for seed, shape in enumerate(shapes))
    expected = y.double() + narrow.double() @ up.double().t() + past.double()
    assert distance(add_lora_residual(y, narrow, up, past), expected) < NEAR[dtype]


def test_what_lora_gives_arrives_beside_something_large() -> None:
    """Early in training it is less than a rounding step of what goes past, which it must not be
    added to alone. On average it has to come through whole."""
    rows, wide, rank = 512, 64, 4
    x, past = (some((rows, wide), n).bfloat16() for n in (1, 2))
    narrow = some((rows, rank), 3).bfloat16()
    up, weight = some((wide, rank), 4).bfloat16() / 2000, some((wide, wide), 5).bfloat16() / 30
    without = stacked_linear(narrow, torch.zeros_like(up), x, [weight], 4 * past)
    arrived = (stacked_linear(narrow, up, x, [weight], 4 * past) - without).double()
    given = narrow.double() @ up.double().t()
    assert (arrived * given).sum() / (given * given).sum() == pytest.approx(1, abs=0.15)


def test_it_has_the_shape_of_what_went_past() -> None:
    x, narrow, up = some((6, WIDE), 1), some((6, 4), 2), some((8, 4), 3)
    past, weight = some((2, 3, 8), 4), some((8, WIDE), 5)
    found = stacked_linear(narrow, up, x, [weight], past)
    expected = x @ weight.t() + narrow @ up.t() + past.view(6, 8)
    assert found.shape == past.shape
    assert not found._is_view()  # FSDP2 hangs its hook on what a layer returns
    assert distance(found.view(6, 8), expected.double()) < 1e-6


def test_nothing_is_read_that_was_not_written() -> None:
    """Some matrix units look behind the end of a row, if rows lie apart."""
    for rank in (3, 6, 7, 16):
        made = tuple(linear(size, 64, n, torch.bfloat16) for n, size in enumerate(SIZES))
        stack_weights(made, 16)
        x, down = some((18, 64), 5).bfloat16(), some((rank, 64), 6).bfloat16()
        y = stacked_linear_lora_a(x, down, weights_of(made), 16)
        assert y.isfinite().all()
        assert stacked_linear_backward(None, down, y, weights_of(made), 16).isfinite().all()
