"""Our own kernels, and torch's 8-bit product, against float64. Memory that is handed out is full of
NaN meanwhile, so a number that nobody writes shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardtune.kernels import lora_dropout as dropout
from shardtune.kernels.cross_entropy import cross_entropy_in_place
from shardtune.kernels.lora_residual import add_lora_residual
from shardtune.kernels.matmul_fp32_out import matmul_fp32_out
from shardtune.kernels.stacked_linear import stack_weights
from shardtune.kernels.swiglu import swiglu_backward
from shardtune.kernels.swiglu_lora import swiglu_lora, swiglu_lora_backward
from shardtune.models.fused.lora_autograd import LoRALinear, LoRASwiGLUMLP
from shardtune.models.quantization.fp8_linear import (
    FP8Linear,
    describe_fp8_matmul,
    has_fp8_matmul,
    quantize_fp8_rowwise,
)
from shardtune.models.quantization.gptq import HessianAccumulator, gptq_quantize
from shardtune.parallel.ddp.single_gpu import ROUNDED_GRADIENT_TOKENS, add_up_rows
from tests.engine.test_adamw_split_bf16 import KINDS, LIMIT, follows_torch
from tests.kernels.test_cross_entropy import BENT, SHAPES, assert_right
from tests.kernels.test_cross_entropy import given as rows_of
from tests.kernels.test_rope import Order, assert_turned
from tests.kernels.test_swiglu_lora import assert_right as assert_gated
from tests.kernels.test_swiglu_lora import given
from tests.models import exact
from tests.models.exact import distance, some, with_gradients
from tests.models.test_full_finetune import assert_opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch tells what isn't deterministic
    pytest.mark.usefixtures("poisoned_memory"),
]
NEAR = {torch.bfloat16: 0.01, torch.float16: 0.002}
TILED = [(1, 128), (64, 256), (129, 64), (33, 1000), (1000, 14336)]
"""Rows, and half of the columns: less than a tile, exactly some, some and a bit, columns that
aren't whole tiles, a real MLP."""


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("rank", [8, 16, 24, 64, 100, 128])
@pytest.mark.parametrize("size", TILED, ids=str)
def test_gated_as_float64(size: tuple[int, int], rank: int, dtype: torch.dtype) -> None:
    numbers = given(*size, rank, 16 if rank == 24 else rank, dtype)
    y, narrow, up, down, outer, last = (each.cuda() for each in numbers)
    found = (
        *swiglu_lora(y, narrow, up, down),
        *swiglu_lora_backward(outer, last, down, y, narrow, up),
    )
    assert_gated(found, y, narrow, up, down, outer, last, NEAR[dtype])


@pytest.mark.parametrize("rank", [4, 8, 24, 48, 100])
@pytest.mark.parametrize("together", [False, True])
def test_an_mlp_as_float64(rank: int, together: bool) -> None:
    wide, inner, rows, dtype = 96, 192, 77, torch.bfloat16

    def linear(outputs: int, inputs: int, seed: int) -> nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        layer.weight.data = (some((outputs, inputs), seed) / inputs**0.5).to(dtype).cuda()
        return layer

    first, last = (linear(inner, wide, 0), linear(inner, wide, 1)), linear(wide, inner, 2)
    if together:
        stack_weights(first, 2 * rank)
    parts = [
        some((rows, wide), 5).to(dtype),
        some((2 * rank, wide), 6) / wide**0.5,
        some((2 * inner, rank), 3) / rank**0.5,
        some((rank, inner), 7) / inner**0.5,
        some((wide, rank), 8) / rank**0.5,
        some((rows, wide), 9).to(dtype),
    ]
    own = [each.cuda() for each in parts]
    found = with_gradients(lambda *each: LoRASwiGLUMLP.apply(*each, first, (last,)), own)
    weights = ([layer.weight.double() for layer in first], last.weight.double())
    expected = with_gradients(
        lambda *each: exact.gated_mlp(*each, *weights), [each.double() for each in own]
    )
    for ours, right in zip(found, expected, strict=True):
        assert distance(ours, right) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, *NEAR])
@pytest.mark.parametrize("heads", [(4, 4), (32, 8), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("by", ["token", "head"])
def test_turned_as_float64(
    heads: tuple[int, int], by: Order, width: int, dtype: torch.dtype
) -> None:
    assert_turned(heads, width, dtype, "cuda", by)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(77, 200, 8), (300, 512, 48), (16, 64, 5), (300, 200, 100)]
)
def test_a_product_completed_as_float64(
    rows: int, columns: int, rank: int, dtype: torch.dtype
) -> None:
    shapes = ((rows, columns), (rows, rank), (columns, rank), (rows, columns))
    y, narrow, up, past = (some(s, n).to(dtype).cuda() for n, s in enumerate(shapes))
    expected = y.double() + narrow.double() @ up.double().t() + past.double()
    assert distance(add_lora_residual(y, narrow, up, past), expected) < NEAR[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, *NEAR])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_as_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits, targets = rows_of(*shape, dtype)
    for bent in BENT:
        assert_right(cross_entropy_in_place, logits.cuda(), targets.cuda(), *bent)


def test_the_loss_of_rows_that_lie_apart() -> None:
    """A piece of a larger buffer: what is beside it stays."""
    logits, targets = rows_of(7, 50, torch.bfloat16)
    buffer = torch.full((7, 64), 3.0, dtype=torch.bfloat16, device="cuda")
    buffer[:, :50] = logits.cuda()
    _, gradient = cross_entropy_in_place(buffer[:, :50], targets.cuda())
    assert gradient.data_ptr() == buffer.data_ptr()
    assert (buffer[:, 50:] == 3.0).all()


def test_sums_are_not_rounded_to_16_bits() -> None:
    left, right = (some((64, 4096), n).bfloat16().cuda() for n in (0, 1))
    found = matmul_fp32_out(left, right.t())
    assert found.dtype == torch.float32
    assert distance(found, left.double() @ right.double().t()) < 1e-5


@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_fp8_matmul("cuda")), reason="needs a GPU with fp8"
)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(77, 96, 160), (256, 512, 256)])
def test_8_bit_products_as_float64(rows: int, inputs: int, outputs: int) -> None:
    assert describe_fp8_matmul("cuda") == "frozen weights: stored and multiplied in fp8"
    layer = FP8Linear(nn.Linear(inputs, outputs, bias=False), torch.bfloat16)
    exact = (some((outputs, inputs), 0) / inputs**0.5).bfloat16().cuda()
    layer.quantize(exact)
    x = (some((rows, inputs), 1) + 10 * some((inputs,), 5)).bfloat16().cuda()
    layer.observe()
    layer.quantize_input(x)
    layer.finish_calibration()
    layer.requantize(exact)
    layer.copy_outlier_columns()
    given = [x, (some((16, inputs), 2) / 10).cuda(), (some((outputs, 16), 3) / 10).cuda()]
    outer = some((rows, outputs), 4).bfloat16().cuda()
    found = with_gradients(lambda *own: LoRALinear.apply(*own, None, (layer,)), given, outer)

    def restored(small: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return small.double() * scale.double()

    _, down, up = (each.bfloat16().double() for each in given)
    usual = layer.input_mean
    y = (
        restored(*quantize_fp8_rowwise(x, usual, layer.outlier_channels))
        @ restored(layer.weight, layer.scale).t()
    )
    y += exact.double() @ usual.double() + x.double() @ down.t() @ up.t()
    to_x = (
        restored(*quantize_fp8_rowwise(outer))
        @ restored(layer.backward_weight, layer.backward_scale).t()
    )
    to_x += outer.double() @ up @ down
    for ours, right in zip(found[:2], (y, to_x), strict=True):
        assert distance(ours, right) < 0.01


@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_fp8_matmul("cuda")), reason="needs a GPU with fp8"
)
@pytest.mark.parametrize(("rows", "columns"), [(5, 40), (300, 200), (1024, 576)])
def test_rounding_by_data_as_column_by_column(rows: int, columns: int) -> None:
    """The same as on a CPU, but for the odd number half-way between two, and what follows it."""
    weight, x = some((rows, columns), 0), some((4 * columns, columns), 1).cumsum(1)
    found = []
    for device in ("cpu", "cuda"):
        heard = HessianAccumulator(columns, torch.device(device))
        heard.add(x.to(device))
        heard.mean()
        factor = heard.inverse_factor()
        assert factor is not None
        own = weight.to(device)
        found.append(gptq_quantize(own, quantize_fp8_rowwise(own)[1], factor).cpu().float())
    spread = (x - x.mean(0)).double()
    scale = quantize_fp8_rowwise(weight)[1]
    off = [float(((each * scale - weight).double() @ spread.t()).norm()) for each in found]
    nearest = float(
        ((quantize_fp8_rowwise(weight)[0].float() * scale - weight).double() @ spread.t()).norm()
    )
    assert off[1] == pytest.approx(off[0], rel=0.02)
    assert off[1] < 0.6 * nearest


@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_fp8_matmul("cuda")), reason="needs a GPU with fp8"
)
@pytest.mark.parametrize("columns", [16, 100, 14336, 40000])
def test_rows_in_8_bits(columns: int) -> None:
    """The same numbers as step by step, but for those half-way between two: by one step."""
    x = some((37, columns), 0).bfloat16()
    x[5] *= 1e-6
    x[6] = 0.0
    some_usual = some((columns,), 1).bfloat16()
    for usual in (None, some_usual):
        small, scale = (
            each.cpu()
            for each in quantize_fp8_rowwise(x.cuda(), None if usual is None else usual.cuda())
        )
        right, right_scale = quantize_fp8_rowwise(x, usual)
        assert torch.allclose(scale, right_scale, rtol=1e-6)
        apart = (small.float() - right.float()).abs()
        assert (apart <= right.float().abs() / 7).all()
        assert (apart > 0).float().mean() < 0.01
    twice = torch.tensor([0, 3, 11], dtype=torch.int32)
    small, scale = (
        each.cpu() for each in quantize_fp8_rowwise(x.cuda(), some_usual.cuda(), twice.cuda())
    )
    both = (small.float()[:, twice] + small.float()[:, columns:]) * scale
    right = (x.float() - some_usual.float())[:, twice]
    bound = right.abs() / 200 + scale * 2**-9  # the least number that there is
    assert ((both - right).abs() <= bound).all()
    x[7, 3], x[8, 0] = torch.inf, torch.nan
    small, _ = quantize_fp8_rowwise(x.cuda())
    assert small.float().isfinite().all(1).logical_not().nonzero().flatten().tolist() == [7, 8]


@pytest.mark.skipif(
    not (torch.cuda.is_available() and has_fp8_matmul("cuda")), reason="needs a GPU with fp8"
)
def test_sizes_that_the_matrix_unit_does_not_take_are_multiplied_as_wider_numbers() -> None:
    layer = FP8Linear(nn.Linear(24, 17, bias=False), torch.bfloat16)
    weight = some((17, 24), 0).bfloat16().cuda()
    layer.quantize(weight)
    x = some((5, 24), 1).bfloat16().cuda().requires_grad_()
    y = layer(x)
    y.sum().backward()  # a gradient that is one number, expanded
    assert distance(y.detach(), x.detach().double() @ weight.double().t()) < 0.06
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("limit", [LIMIT, None])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_adamw_in_one_pass(kind: torch.dtype, limit: float | None) -> None:
    """Beside torch's own, which computes some of it in float64."""
    follows_torch("cuda", kind, limit, near=1e-6)


@pytest.mark.parametrize("tokens", [ROUNDED_GRADIENT_TOKENS, 4 * ROUNDED_GRADIENT_TOKENS])
def test_rows_of_an_embedding_are_added_up_in_fp32(tokens: int) -> None:
    """A token that is every second one: with more tokens torch does so by itself."""
    table = nn.Embedding(50, 64, device="cuda", dtype=torch.bfloat16)
    add_up_rows(table)
    ids = torch.arange(tokens, device="cuda") % 50
    ids[::2] = 7
    outer = some((tokens, 64), 1).to("cuda", torch.bfloat16)
    (found,) = torch.autograd.grad(table(ids), table.weight, outer)
    right = torch.zeros(50, 64, device="cuda", dtype=torch.float64).index_add_(
        0, ids, outer.double()
    )
    assert distance(found, right) < 0.004


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("size", [(1, 8), (77, 4096), (5, 4100), (300, 8192)], ids=str)
def test_the_way_back_through_an_activation(size: tuple[int, int], dtype: torch.dtype) -> None:
    rows, half = size
    gradient, y = some(size, 1).to("cuda", dtype), some((rows, 2 * half), 2).to("cuda", dtype)
    assert_opened(*swiglu_backward(gradient, y), gradient, y, near=NEAR[dtype] / 2)


@pytest.mark.parametrize("rank", [8, 64, 128])
@pytest.mark.parametrize("layers", [1, 3])
def test_dropout_kernels_are_what_the_steps_are(rank: int, layers: int) -> None:
    """The same masks, in fp32 on the CPU: elsewhere they would differ by whole numbers."""
    seed = torch.tensor([-6_148_914_691_236_517_206])
    rows, wide, p = 333, 1088, 0.25
    x, a = some((rows, wide), 1).bfloat16(), some((layers * rank, wide), 2).bfloat16() / wide**0.5
    hidden, gradient = some((rows, layers * rank), 3).bfloat16(), some((rows, wide), 4).bfloat16()
    calls = (
        (dropout.dropout_lora_a, (x, a)),
        (dropout.dropout_lora_a_weight_grad, (hidden, x)),
        (dropout.add_dropout_lora_a_grad, (gradient, hidden, a)),
    )
    for function, tensors in calls:
        found = function(*(each.cuda() for each in tensors), seed.cuda(), p, layers)
        right = function(*(each.float() for each in tensors), seed, p, layers)
        assert distance(found.cpu(), right.double()) < 0.01, function


@pytest.mark.parametrize("rank", [16, 64, 100])
def test_swiglu_with_dropout_is_what_the_steps_are(rank: int) -> None:
    seed = torch.tensor([1_234_567_890_123_456_789])
    tensors = [each.bfloat16() for each in (
        some((333, 512), 1), some((333, 2 * rank), 2), some((512, rank), 3) / rank**0.5,
        some((rank, 256), 4) / 16, some((333, 256), 5), some((333, rank), 6),
    )]  # fmt: skip

    def both(y: Tensor, h: Tensor, b: Tensor, a: Tensor, g: Tensor, last: Tensor) -> list[Tensor]:
        own = seed.to(y.device)
        return [*swiglu_lora(y, h, b, a, own, 0.25),
                *swiglu_lora_backward(g, last, a, y, h, b, own, 0.25)]  # fmt: skip

    found = both(*(each.cuda() for each in tensors))
    for ours, right in zip(found, both(*(each.float() for each in tensors)), strict=True):
        assert distance(ours.cpu(), right.double()) < 0.02
