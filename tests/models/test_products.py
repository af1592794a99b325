"""Products with frozen weights and LoRA beside them, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shardtune.models.fp8 import by_row, scaled
from shardtune.models.gated import gated, gated_back
from shardtune.models.products import Adapted, Closing, Opening, across, back_across
from shardtune.models.quantise import Int8Linear, QuantisedLinear
from shardtune.models.unrounded import in_fp32
from tests.models import exact
from tests.models.exact import distance, some, with_gradients

ROWS, WIDE = 13, 24
NEAR = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.002}
"""A few roundings of each."""


def linear(outputs: int, inputs: int, seed: int, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
    layer.weight.data = some((outputs, inputs), seed).to(dtype) / inputs**0.5
    return layer


def rounded(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return some(shape, seed).to(dtype) / shape[-1] ** 0.5


def as_exact(given: list[Tensor]) -> list[Tensor]:
    return [each.double() for each in given]


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("sizes", [(17,), (24, 8, 8), (5, 7)], ids=str)
def test_adapted_as_float64(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    layers = tuple(linear(size, WIDE, n, dtype) for n, size in enumerate(sizes))
    rank = 3 * len(sizes)
    given = [
        some((ROWS, WIDE), 10).to(dtype),
        rounded((rank, WIDE), 11, dtype).float(),  # as adapters are held
        rounded((sum(sizes), rank), 12, dtype).float(),
    ]
    found = with_gradients(lambda *own: Adapted.apply(*own, layers), given)
    weights = [layer.weight.double() for layer in layers]
    expected = with_gradients(lambda *own: exact.adapted(*own, weights), as_exact(given))
    for ours, right in zip(found, expected, strict=True):
        assert distance(ours, right) < NEAR[dtype]


def test_trained_weights_have_gradients_in_fp32_and_the_input_in_its_own_precision() -> None:
    layer = linear(17, WIDE, 0, torch.bfloat16)
    x = some((ROWS, WIDE), 1).bfloat16().requires_grad_()
    down, up = (nn.Parameter(some(shape, 2)) for shape in ((4, WIDE), (17, 4)))
    Adapted.apply(x, down, up, (layer,)).sum().backward()
    assert (x.grad.dtype, down.grad.dtype, up.grad.dtype) == (  # type: ignore[union-attr]
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert layer.weight.grad is None


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    """The first layer's, where the embedding is frozen."""
    layer, x = linear(17, WIDE, 0, torch.float32), some((ROWS, WIDE), 1)
    down, up = (nn.Parameter(some(shape, 2)) for shape in ((4, WIDE), (17, 4)))
    Adapted.apply(x, down, up, (layer,)).sum().backward()
    assert x.grad is None
    opened, narrow = Opening.apply(x, down, (layer,))
    (opened.sum() + narrow.sum()).backward()
    assert x.grad is None
    assert down.grad is not None


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(("inner", "rank", "next_rank"), [(20, 4, 4), (9, 3, 5)])
def test_gated_mlp_as_float64(inner: int, rank: int, next_rank: int, dtype: torch.dtype) -> None:
    first = tuple(linear(inner, WIDE, n, dtype) for n in (0, 1))
    last = linear(WIDE, inner, 2, dtype)
    given = [
        some((ROWS, WIDE), 5).to(dtype),
        rounded((2 * rank, WIDE), 6, dtype).float(),
        rounded((2 * inner, rank), 3, dtype).float(),
        rounded((next_rank, inner), 7, dtype).float(),
        rounded((WIDE, next_rank), 8, dtype).float(),
    ]

    def ours(x: Tensor, down: Tensor, *others: Tensor) -> Any:
        return Closing.apply(*Opening.apply(x, down, first), *others, (last,))

    weights = ([layer.weight.double() for layer in first], last.weight.double())
    found = with_gradients(ours, given)
    expected = with_gradients(lambda *own: exact.gated_mlp(*own, *weights), as_exact(given))
    for near, right in zip(found, expected, strict=True):
        assert distance(near, right) < 2 * NEAR[dtype]


def test_quantised_weights_are_multiplied_as_they_are_restored() -> None:
    plain = linear(16, WIDE, 0, torch.float32)
    layer = Int8Linear(plain, torch.float32)
    layer.quantise(plain.weight.data)
    assert isinstance(layer, QuantisedLinear)
    given = [some((ROWS, WIDE), 1), some((4, WIDE), 2), some((16, 4), 3)]
    found = with_gradients(lambda *own: Adapted.apply(*own, (layer,)), given)
    weights = [layer.dequantize().double()]
    expected = with_gradients(lambda *own: exact.adapted(*own, weights), as_exact(given))
    for ours, right in zip(found, expected, strict=True):
        assert distance(ours, right) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_compiler_is_told_is_what_comes(dtype: torch.dtype) -> None:
    """Shapes, precision and strides of what each operation gives; and that it changes no input."""
    x, narrow = some((ROWS, WIDE), 0).to(dtype), some((ROWS, 4), 1).to(dtype)
    weights = [some((size, WIDE), size).to(dtype) for size in (8, 5)]
    up, down = some((13, 4), 2).to(dtype), some((4, WIDE), 3).to(dtype)
    gradient = some((ROWS, 13), 4).to(dtype)
    tests = ("test_schema", "test_faketensor")
    for op, given in (
        (across, (narrow, up, x, weights)),
        (across, (None, None, x, weights)),
        (back_across, (narrow, down, gradient, weights)),
        (in_fp32, (x.t(), narrow)),
    ):
        torch.library.opcheck(op, given, test_utils=tests)


def test_the_number_of_rows_stays_open() -> None:
    """A compiler that is told a number would compile once more for every other one."""

    def every(x: Tensor, narrow: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        weight, up, down, last = weights
        return (
            across(narrow, up, x, [weight]),
            back_across(narrow, down, y, [weight]),
            *gated(y, narrow, up, last),
            *gated_back(y[:, :4].contiguous(), x[:, :3].contiguous(), last, y, narrow, up)[:2],
            scaled(None, None, *by_row(x), *by_row(weight), torch.float32),
        )

    of_rows = (some((ROWS, WIDE), 0), some((ROWS, 4), 1), some((ROWS, 8), 2))
    weights = (some((8, WIDE), 3), some((8, 4), 4), some((4, WIDE), 5), some((3, 4), 6))
    traced = make_fx(every, tracing_mode="symbolic")(*of_rows, *weights)
    (results,) = next(node for node in traced.graph.nodes if node.op == "output").args
    assert all(isinstance(each.meta["val"].shape[0], torch.SymInt) for each in results)
