"""Products with frozen weights and LoRA beside them, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shardtune.kernels.matmul_fp32_out import matmul_fp32_out
from shardtune.kernels.stacked_linear import (
    stack_weights,
    stacked_linear,
    stacked_linear_backward,
    stacked_linear_lora_a,
)
from shardtune.kernels.swiglu_lora import swiglu_lora, swiglu_lora_backward
from shardtune.models.fused.lora_autograd import LoRALinear, LoRAQKVRoPE, LoRASwiGLUMLP
from shardtune.models.quantization.bitsandbytes_linear import Int8Linear, QuantizedLinear
from shardtune.models.quantization.fp8_linear import fp8_linear, quantize_fp8_rowwise
from tests.kernels.test_rope import as_transformers
from tests.models import exact
from tests.models.exact import distance, some, with_gradients

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

ROWS, WIDE = 18, 24
NEAR = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.002}
"""A few roundings of each."""
ROOMS = [None, 0, 16]
"""Weights that lie apart; that stand together; and with room for the adapters' matrices."""


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
@pytest.mark.parametrize("together", [False, True])
def test_adapted_as_float64(sizes: tuple[int, ...], together: bool, dtype: torch.dtype) -> None:
    layers = tuple(linear(size, WIDE, n, dtype) for n, size in enumerate(sizes))
    if together:
        stack_weights(layers, 0)
    rank = 3 * len(sizes)
    given = [
        some((ROWS, WIDE), 10).to(dtype),
        rounded((rank, WIDE), 11, dtype).float(),  # as adapters are held
        rounded((sum(sizes), rank), 12, dtype).float(),
    ]
    past = some((ROWS, sum(sizes)), 13).to(dtype)
    weights = [layer.weight.double() for layer in layers]
    found = with_gradients(lambda *own: LoRALinear.apply(*own, None, layers), given)
    expected = with_gradients(lambda *own: exact.adapted(*own, weights), as_exact(given))
    for ours, right in zip(found, expected, strict=True):
        assert distance(ours, right) < NEAR[dtype]
    found = with_gradients(lambda *own: LoRALinear.apply(*own, layers), [*given, past])
    expected = with_gradients(
        lambda *own: own[3] + exact.adapted(*own[:3], weights), as_exact([*given, past])
    )
    for ours, right in zip(found, expected, strict=True):
        assert distance(ours, right) < NEAR[dtype]


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(
    ("heads", "wide"), [((4, 4, 4), 8), ((6, 2, 2), 4), ((3, 1, 1), 12), ((3, 1, 1), 16)]
)
@pytest.mark.parametrize("room", ROOMS)
def test_queries_keys_and_values_as_float64(
    heads: tuple[int, ...], wide: int, room: int | None, dtype: torch.dtype
) -> None:
    rows, length = 2, 9
    layers = tuple(linear(count * wide, WIDE, n, dtype) for n, count in enumerate(heads))
    if room is not None:
        stack_weights(layers, room)
    given = [
        some((rows, length, WIDE), 10).to(dtype),
        rounded((16, WIDE), 11, dtype).float(),
        rounded((sum(heads) * wide, 16), 12, dtype).float(),
    ]
    angles = some((1, length, wide // 2), 13).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [layer.weight.double() for layer in layers]

    def ours(*own: Tensor) -> Tensor:
        parts = LoRAQKVRoPE.apply(*own, cos, sin, heads, layers)
        return torch.cat([part.flatten(2) for part in parts], dim=-1)

    def right(*own: Tensor) -> Tensor:
        joint = exact.adapted(*own, weights)
        parts = as_transformers(joint, cos.double(), sin.double(), heads)
        return torch.cat([part.flatten(2) for part in parts], dim=-1)

    found, expected = with_gradients(ours, given), with_gradients(right, as_exact(given))
    for near, each in zip(found, expected, strict=True):
        assert distance(near, each) < NEAR[dtype]


def test_trained_weights_have_gradients_in_fp32_and_the_input_in_its_own_precision() -> None:
    layer = linear(17, WIDE, 0, torch.bfloat16)
    x = some((ROWS, WIDE), 1).bfloat16().requires_grad_()
    down, up = (nn.Parameter(some(shape, 2)) for shape in ((4, WIDE), (17, 4)))
    LoRALinear.apply(x, down, up, None, (layer,)).sum().backward()
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
    LoRALinear.apply(x, down, up, None, (layer,)).sum().backward()
    assert x.grad is None
    assert down.grad is not None


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(("inner", "rank", "next_rank"), [(20, 4, 4), (9, 3, 5), (80, 16, 16)])
@pytest.mark.parametrize("room", ROOMS)
def test_gated_mlp_as_float64(
    inner: int, rank: int, next_rank: int, room: int | None, dtype: torch.dtype
) -> None:
    first = tuple(linear(inner, WIDE, n, dtype) for n in (0, 1))
    if room is not None:
        stack_weights(first, room)
    last = linear(WIDE, inner, 2, dtype)
    given = [
        some((ROWS, WIDE), 5).to(dtype),
        rounded((2 * rank, WIDE), 6, dtype).float(),
        rounded((2 * inner, rank), 3, dtype).float(),
        rounded((next_rank, inner), 7, dtype).float(),
        rounded((WIDE, next_rank), 8, dtype).float(),
        some((ROWS, WIDE), 9).to(dtype),
    ]

    def ours(*own: Tensor) -> Any:
        return LoRASwiGLUMLP.apply(*own, first, (last,))

    weights = ([layer.weight.double() for layer in first], last.weight.double())
    found = with_gradients(ours, given)
    expected = with_gradients(lambda *own: exact.gated_mlp(*own, *weights), as_exact(given))
    for near, right in zip(found, expected, strict=True):
        assert distance(near, right) < 2 * NEAR[dtype]


def test_quantized_weights_are_multiplied_as_they_are_restored() -> None:
    plain = linear(16, WIDE, 0, torch.float32)
    layer = Int8Linear(plain, torch.float32)
    layer.quantize(plain.weight.data)
    assert isinstance(layer, QuantizedLinear)
    given = [some((ROWS, WIDE), 1), some((4, WIDE), 2), some((16, 4), 3)]
    found = with_gradients(lambda *own: LoRALinear.apply(*own, None, (layer,)), given)
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
    layers = tuple(linear(size, WIDE, size, dtype) for size in (8, 5))
    stack_weights(layers, 4)
    together = [layer.weight for layer in layers]
    tests = ("test_schema", "test_faketensor")
    for op, given in (
        (stacked_linear, (narrow, up, x, weights)),
        (stacked_linear, (None, None, x, weights)),
        (stacked_linear, (narrow, up, x, weights, gradient.view(1, ROWS, 13))),
        (stacked_linear_lora_a, (x, down, weights, 0)),
        (stacked_linear_lora_a, (x, down, together, 4)),
        (stacked_linear_backward, (narrow, down, gradient, weights)),
        (stacked_linear_backward, (None, down, torch.cat([gradient, narrow], dim=1), weights, 0)),
        (stacked_linear_backward, (None, down, torch.cat([gradient, narrow], dim=1), together, 4)),
        (matmul_fp32_out, (x.t(), narrow)),
    ):
        torch.library.opcheck(op, given, test_utils=tests)


def test_the_number_of_rows_stays_open() -> None:
    """A compiler that is told a number would compile once more for every other one."""

    def every(x: Tensor, narrow: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        weight, up, down, last = weights
        return (
            stacked_linear(narrow, up, x, [weight]),
            stacked_linear_lora_a(x, down, [weight], 0),
            stacked_linear_backward(narrow, down, y, [weight]),
            *swiglu_lora(y, narrow, up, last),
            *swiglu_lora_backward(
                y[:, :4].contiguous(), x[:, :3].contiguous(), last, y, narrow, up
            )[:1],
            fp8_linear(
                None,
                None,
                *quantize_fp8_rowwise(x),
                *quantize_fp8_rowwise(weight),
                None,
                torch.float32,
            ),
        )

    of_rows = (some((ROWS, WIDE), 0), some((ROWS, 4), 1), some((ROWS, 8), 2))
    weights = (some((8, WIDE), 3), some((8, 4), 4), some((4, WIDE), 5), some((3, 4), 6))
    traced = make_fx(every, tracing_mode="symbolic")(*of_rows, *weights)
    (results,) = next(node for node in traced.graph.nodes if node.op == "output").args
    assert all(isinstance(each.meta["val"].shape[0], torch.SymInt) for each in results)
