"""Frozen weights in 8-bit floating point: how near they are, what they take, how they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardtune.config.job import IA3, Adapter, LoRA, ModelSection, TrainSection
from shardtune.config.model_config import shape_of
from shardtune.core.lr_schedule import Schedule
from shardtune.core.model import quantized_size
from shardtune.core.model.fp8_memory import HESSIAN_BUDGET, hessian_bytes
from shardtune.core.model.quantized_size import gptq_bytes
from shardtune.core.setup import EngineSetup, OptimizerSetup, Quantization
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.measure.allocation_ledger import AllocationLedger
from shardtune.models import materialize as parts
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.fused.lora import FusedLoRALinear, LoRAMLP, LoRASharedInput
from shardtune.models.fused.lora_autograd import LoRALinear
from shardtune.models.load_result import load_result
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization import calibration
from shardtune.models.quantization import fp8_linear as fp8
from shardtune.models.quantization.fp8_linear import (
    FP8Linear,
    StackedFP8Linear,
    describe_fp8_matmul,
    quantize_fp8_rowwise,
)
from shardtune.models.quantization.gptq import (
    E4M3,
    E4M3_MAX,
    HessianAccumulator,
    as_bytes,
    gptq_quantize,
)
from shardtune.parallel.ddp.engine import DDPEngine
from tests.models import exact
from tests.models.exact import distance, some, with_gradients
from tests.models.families import write
from tests.ranks import on_ranks

IDS = torch.arange(24).view(2, 12) * 2
HALF_STEP = 2**-4
"""Three bits behind the point: a number is off by half of the last at most."""


def filled(outputs: int, inputs: int, seed: int = 0, compute: torch.dtype = torch.float32) -> Any:
    layer = FP8Linear(nn.Linear(inputs, outputs, bias=False), compute)
    layer.quantize(some((outputs, inputs), seed) / inputs**0.5)
    return layer


def build(
    folder: Path, quantization: Quantization, adapter: Adapter | None = None, **train: Any
) -> Any:
    model = ModelSection(name=str(folder), quantization=quantization)
    adapter = adapter or LoRA(rank=4)
    return PretrainedModelBuilder(
        ModelFiles(model), adapter, TrainSection(**{"precision": "bf16"} | train)
    ).whole("cpu")


def loss_of(model: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=IDS, labels=IDS, use_cache=False).loss  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "qwen2")
    return tmp_path


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """One whose layers have second columns."""
    write(tmp_path, "qwen2", hidden_size=128, intermediate_size=192)
    return tmp_path


# The numbers -------------------------------------------------------------------------------------


def test_each_row_uses_the_whole_range() -> None:
    x = some((5, 33), 0) * torch.tensor([1e-6, 1.0, 1e3, 0.0, 1e-3])[:, None]
    small, scale = quantize_fp8_rowwise(x)
    assert small.dtype == E4M3
    assert scale.shape == (5, 1)
    assert small.float().abs().amax(1).tolist() == [E4M3_MAX, E4M3_MAX, E4M3_MAX, 0.0, E4M3_MAX]
    back = small.float() * scale
    normal = small.float().abs() >= 2**-6  # below are numbers with fewer bits
    assert ((back - x).abs() <= HALF_STEP * x.abs() * 1.0001)[normal].all()


def test_what_a_compiler_is_told_of_rows_is_what_comes() -> None:
    for x in (some((7, 5), 0), some((5, 7), 0).t(), some((7, 5), 0).bfloat16()):
        torch.library.opcheck(
            quantize_fp8_rowwise, (x,), test_utils=("test_schema", "test_faketensor")
        )


def test_columns_that_come_twice_are_finer() -> None:
    """The second time with what rounding has left: three bits more and one for the sign."""
    x, common, twice = (
        some((6, 40), 0),
        some((40,), 1),
        torch.tensor([3, 17, 30], dtype=torch.int32),
    )
    small, scale = quantize_fp8_rowwise(x, common, twice)
    assert small.shape == (6, 43)
    back, right = small.float() * scale, x - common
    plain, _ = quantize_fp8_rowwise(right)
    assert torch.equal(small[:, :40].float(), plain.float())
    normal = small.float()[:, 40:].abs() >= 2**-6
    off = (back[:, :40][:, twice] + back[:, 40:] - right[:, twice]).abs()
    assert (off <= HALF_STEP**2 * right[:, twice].abs() * 1.001)[normal].all()
    options = ("test_schema", "test_faketensor")
    torch.library.opcheck(quantize_fp8_rowwise, (x, common, twice), test_utils=options)


def test_what_is_not_finite_stays_so() -> None:
    x = torch.ones(3, 4)
    x[1, 2], x[2, 0] = torch.inf, torch.nan
    y = filled(8, 4)(x)
    assert y.isfinite().all(1).tolist() == [True, False, False]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(13, 24, 17), (1, 7, 5), (16, 32, 16)])
def test_product_of_the_8_bit_numbers_as_float64(rows: int, inputs: int, outputs: int) -> None:
    """What is rounded is input and weights; the product itself is exact but for fp32."""
    layer, x = filled(outputs, inputs), some((rows, inputs), 1)
    restored = [part.double() for part in quantize_fp8_rowwise(x)]
    expected = restored[0] * restored[1] @ (layer.weight.double() * layer.scale.double()).t()
    assert distance(layer(x), expected) < 1e-6
    gradient = some((rows, outputs), 2)
    (found,) = torch.autograd.grad(layer(x.requires_grad_()), x, gradient)
    restored = [part.double() for part in quantize_fp8_rowwise(gradient)]
    # The backward pass has rows, and so scales, of its own.
    expected = (
        restored[0]
        * restored[1]
        @ (layer.backward_weight.double() * layer.backward_scale.double()).t()
    )
    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_near_to_float64_with_the_weights_as_they_were(compute: torch.dtype) -> None:
    """Two operands, each off by up to 6 % in either direction: 4 % on the whole."""
    layer, weight = filled(40, 96, 0, compute), some((40, 96), 0).double() / 96**0.5
    given = [some((64, 96), 1).to(compute), some((8, 96), 2) / 10, some((40, 8), 3) / 10]
    found = with_gradients(lambda *own: LoRALinear.apply(*own, None, (layer,)), given)
    expected = with_gradients(
        lambda *own: exact.adapted(*own, [weight]), [each.double() for each in given]
    )
    near = 1e-6 if compute == torch.float32 else 0.01
    for ours, right, bound in zip(found, expected, (0.05, 0.05, near, near), strict=True):
        assert distance(ours, right) < bound  # adapters' gradients don't see 8 bits at all


def test_a_member_of_a_joint_layer_has_its_rows() -> None:
    members = [FP8Linear(nn.Linear(24, size, bias=False), torch.float32) for size in (16, 8, 8)]
    joint = StackedFP8Linear(members)
    weights = [some((len_, 24), len_ + n) for n, len_ in enumerate((16, 8, 8))]
    for n in (1, 0, 2):  # in whatever order the files have them
        assert joint.weight.is_meta
        members[n].quantize(weights[n])
    x = some((5, 24), 9).requires_grad_()
    whole = joint(x)
    parts = [member(x) for member in members]
    assert torch.equal(whole, torch.cat(parts, 1))
    for member, weight in zip(members, weights, strict=True):
        assert not list(member.parameters())  # held once, by the joint layer
        assert distance(member.dequantize(), weight.double()) < 0.04
        alone = FP8Linear(nn.Linear(24, len(weight), bias=False), torch.float32)
        alone.quantize(weight)
        outer = some((5, len(weight)), 7)
        found, expected = (torch.autograd.grad(m(x), x, outer)[0] for m in (member, alone))
        assert distance(found, expected.double()) < 0.06


def test_a_scale_does_not_lose_a_gradient_that_is_not_contiguous() -> None:
    layer, x = filled(8, 4), some((3, 4), 1).requires_grad_()
    layer(x).sum().backward()  # one number, expanded
    (right,) = torch.autograd.grad(layer(x), x, torch.ones(3, 8))
    assert torch.equal(x.grad, right)


# In a model --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.filterwarnings("ignore")  # of torch's own, when its compiler is imported
def test_the_loss_is_near_to_that_in_bf16(
    folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda layer: None)  # its way, without the compiler
    plain, model = build(folder, "none"), build(folder, "fp8", kernels=kernels)
    kinds = [k for m in model.modules() for k in (LoRASharedInput, LoRAMLP) if isinstance(m, k)]
    assert kinds == ([LoRASharedInput, LoRAMLP] * 3 if kernels == "compiled" else [])
    expected, found = loss_of(plain), loss_of(model)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=0.03)
    expected.backward()
    found.backward()
    ours, theirs = (
        torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
        for each in (model, plain)
    )
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.95


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "adapter", [IA3(), LoRA(rank=4, variant="dora"), LoRA(rank=4, dropout=0.1)], ids=str
)
def test_other_adapters_are_above_8_bits_too(folder: Path, adapter: Adapter) -> None:
    model = build(folder, "fp8", adapter)
    loss_of(model).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 and p.grad is not None for p in trained)
    plain = build(folder, "none", adapter)
    near = float(loss_of(plain.eval()).detach())
    assert float(loss_of(model.eval()).detach()) == pytest.approx(near, rel=0.03)


def test_joint_weights_are_counted_once(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda layer: None)
    setup = EngineSetup("bf16", OptimizerSetup(), Schedule("constant", 1e-3, 0, 9), 1.0, seed=0)
    held = {}
    for kernels in ("eager", "compiled"):
        model = build(wide, "fp8", kernels=kernels)
        with NativeEngine(model, setup, World()) as engine:
            held[kernels] = engine.held().bytes["params", "gpu"]
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        frozen = sum(m.in_features * m.out_features for m in linears if type(m) is FP8Linear)
        found = {p for m in linears if isinstance(m, FP8Linear) for p in m.parameters()}
        small = sum(p.numel() for p in found if p.dtype == E4M3)
        more = {m.holder: len(m.holder.outlier_channels) for m in linears if type(m) is FP8Linear}
        again = sum(size * len(m.weight) for m, size in more.items())
        assert small == 2 * frozen + again  # each weight once for each direction, a byte each
        assert not any(p.is_meta for p in model.parameters())
    # Joint layers have one row of scales for what goes back, and one of what inputs usually are,
    # not one each: 3 layers, of which each saves two for attention and one for the MLP, 128 wide;
    # and so they do with the numbers of 16 channels.
    assert held["eager"] - held["compiled"] == 3 * (2 + 1) * (128 * (4 + 2) + 16 * 4)


def test_a_saved_adapter_is_loaded_on_the_original_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda layer: None)
    model = build(folder, "fp8", kernels="compiled").eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = some(parameter.shape, seed=5) / 5
    model.save_pretrained(tmp_path / "result")
    model.generation_config.save_pretrained(tmp_path / "result")
    section = ModelSection(name=str(folder), quantization="fp8")
    loaded = load_result(str(tmp_path / "result"), ModelFiles(section), "bf16").eval()
    assert not any(isinstance(m, FusedLoRALinear | FP8Linear) for m in loaded.modules())
    assert {p.dtype for n, p in loaded.named_parameters() if "lora" not in n} == {torch.bfloat16}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = (each(input_ids=IDS).logits.double() for each in (model, loaded))
    assert distance(found, expected) < 0.1


# What inputs usually are -------------------------------------------------------------------------


def test_what_inputs_have_in_common_costs_nothing() -> None:
    """Large in a few channels, the same in all rows, as in every trained model: rounded with the
    rest it would be off by a share of itself, each time by the same."""
    layer, weight = filled(40, 96), some((40, 96), 0) / 96**0.5
    x = some((64, 96), 1)
    x[:, ::16] += 50.0
    expected = x.double() @ weight.double().t()

    def common(y: Tensor) -> float:  # how far off all rows are in the same direction
        return float((y.double() - expected).mean(0).norm() / expected.mean(0).norm())

    before, before_common = distance(layer(x), expected), common(layer(x))
    layer.observe()
    layer(x[:32])
    layer(x[32:])
    layer.finish_calibration()
    assert torch.allclose(layer.input_mean, x.mean(0), atol=1e-5)
    layer.requantize(weight)
    layer.copy_outlier_columns()
    assert layer.observer is None
    assert distance(layer(x), expected) < before / 5
    assert common(layer(x)) < before_common / 5


def test_the_channels_that_matter_most_come_twice() -> None:
    layer, x = filled(40, 96), some((64, 96), 1)
    large = list(range(5, 96, 6))  # sixteen, as many as there is a second column for
    x[:, large] *= 20
    layer.observe()
    layer(x)
    layer.finish_calibration()
    weight = some((40, 96), 0) / 96**0.5
    layer.requantize(weight)
    layer.copy_outlier_columns()
    assert layer.outlier_channels.tolist() == large
    small = layer.weight.float()
    assert torch.equal(small[:, 96:], small[:, large])
    assert distance(layer.dequantize(), weight.double()) < 0.15  # some further off than they need


def test_weights_rounded_by_data_do_less_to_outputs() -> None:
    """Where channels go together, and on other inputs of the same kind than those heard."""
    weight, mixing = some((40, 96), 0) / 96**0.5, some((12, 96), 1)
    inputs = [some((512, 12), seed) @ mixing + some((512, 96), seed + 9) / 5 for seed in (2, 3)]
    heard = HessianAccumulator(96, torch.device("cpu"))
    heard.add(inputs[0][:200])
    heard.add(inputs[0][200:])
    assert torch.allclose(heard.mean(), inputs[0].mean(0), atol=1e-5)
    assert torch.allclose(heard.hessian / 511, inputs[0].t().cov(), rtol=1e-3, atol=1e-3)
    factor = heard.inverse_factor()
    assert factor is not None
    nearest, scale = quantize_fp8_rowwise(weight)
    found = gptq_quantize(weight, scale, factor)

    def off(small: Tensor) -> float:
        return distance(inputs[1] @ (small.float() * scale).t(), (inputs[1] @ weight.t()).double())

    assert off(found) < 0.5 * off(nearest)
    assert (found.float() * scale - weight).abs().max() < 0.5 * weight.abs().max()
    layer = filled(40, 96)
    layer.observe()
    layer.quantize_input(inputs[0])
    layer.finish_calibration()
    layer.requantize(weight)
    layer.copy_outlier_columns()
    assert off(layer.weight[:, :96]) < 0.5 * off(nearest)


def test_a_large_mean_takes_nothing_from_what_differs() -> None:
    """Sums of squares alone would lose it: of 10,000 and 1 a 32-bit number has no digits left."""
    x = some((4096, 8), 0) + 1e4 * torch.arange(8)
    heard = HessianAccumulator(8, torch.device("cpu"))
    for part in x.split(512):
        heard.add(part)
    assert torch.allclose(heard.mean(), x.double().mean(0).float(), rtol=1e-6)
    assert torch.allclose(heard.hessian / 4095, x.double().t().cov().float(), rtol=0.01, atol=0.05)


def test_the_first_token_does_not_decide_what_is_usual() -> None:
    """In many models it is a thousand times as large as all others."""
    x = some((40, 8), 0)
    x[0, 3] = 1e4
    heard = HessianAccumulator(8, torch.device("cpu"))
    heard.add(x)
    heard.add(x[:0])  # as an expert gets that no token was sent to
    mean = heard.mean()
    assert torch.allclose(mean, x[1:].mean(0), atol=1e-5)
    off = (x - mean).double()  # but how weights are rounded does matter to it
    assert distance(heard.hessian, off.t() @ off) < 1e-5
    rest = off[:, :3].t() @ off[:, :3]
    assert distance(heard.hessian[:3, :3], rest) < 1e-4


@pytest.mark.parametrize(
    "spread", [torch.zeros(6, 6), torch.ones(6, 6), torch.full((6, 6), torch.inf)], ids=str
)
def test_there_may_be_no_factor_but_none_that_is_not_finite(spread: Tensor) -> None:
    heard = HessianAccumulator(6, torch.device("cpu"))
    heard.hessian = spread.clone()
    factor = heard.inverse_factor()
    assert (factor is None) is (not spread.isfinite().all() or not spread.any())
    assert factor is None or factor.isfinite().all()


def test_channels_that_say_nothing_leave_weights_as_they_are() -> None:
    """Each rounded by itself is best where inputs have nothing to do with each other; and silence,
    or what isn't a number, is no ground for anything."""
    weight = some((8, 20), 0)
    nearest, scale = quantize_fp8_rowwise(weight)
    heard = HessianAccumulator(20, torch.device("cpu"))
    heard.hessian = torch.eye(20)
    factor = heard.inverse_factor()
    assert factor is not None
    assert torch.equal(gptq_quantize(weight, scale, factor).float(), nearest.float())
    for x in (torch.zeros(4, 20), torch.full((4, 20), torch.nan)):
        layer = filled(8, 20)
        before = layer.weight.float()
        layer.observe()
        layer.quantize_input(x)
        layer.finish_calibration()
        layer.requantize(weight)
        layer.copy_outlier_columns()
        assert torch.equal(layer.weight.float(), before)
        assert not layer.input_mean.any()


def rounded_by(folder: Path, adapter: Adapter, texts: list[list[int]], **train: Any) -> Any:
    model = ModelSection(name=str(folder), quantization="fp8")
    return PretrainedModelBuilder(
        ModelFiles(model), adapter, TrainSection(**{"precision": "bf16"} | train), lambda: texts
    ).whole("cpu")


TEXTS = [IDS[0].tolist(), IDS[1, :5].tolist()]


@pytest.mark.long
def test_as_many_layers_listen_as_there_is_room_for(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes later hears what is rounded already, which is another thing, but not by much."""
    found: list[list[Tensor]] = []
    runs: list[list[int]] = []

    def count(passage: calibration.CalibrationPass, group: Any) -> None:
        runs[-1].append(len(group))
        hear(passage, group)

    hear = calibration.CalibrationPass.collect
    monkeypatch.setattr(calibration.CalibrationPass, "collect", count)
    for room in (calibration.HESSIAN_BUDGET, 1):
        monkeypatch.setattr(calibration, "HESSIAN_BUDGET", room)
        runs.append([])
        model = rounded_by(wide, LoRA(rank=4), TEXTS)
        found.append([m.forward_weights()[2] for m in model.modules() if type(m) is FP8Linear])
    assert runs == [[3], [1, 1, 1]]
    for one, other in zip(*found, strict=True):
        assert one.any()
        assert distance(one, other.double()) < 0.3


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "passes"),
    [
        pytest.param("qwen2", 2 * 6 - 1, id="know none"),
        pytest.param("gemma4_text", 6 * 7 // 2, id="share keys and values", marks=pytest.mark.long),
        pytest.param(
            "gemma4", 6 * 7 // 2, id="do so, in a model that sees", marks=pytest.mark.long
        ),
    ],
)
def test_texts_pass_a_layer_twice_where_layers_know_no_others(
    tmp_path: Path, family: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once while it listens, and once on the way to the next; with the same result to the bit as if
    each pass began at the beginning."""
    kind = type(parts.decoder_layers(write(tmp_path, family, num_hidden_layers=6))[-1])
    passed: list[int] = []
    forward = kind.forward

    def counted(layer: nn.Module, *given: Any, **named: Any) -> Any:
        passed[-1] += 1
        return forward(layer, *given, **named)

    monkeypatch.setattr(kind, "forward", counted)
    monkeypatch.setattr(calibration, "HESSIAN_BUDGET", 1)
    found: list[list[bytes]] = []
    for _ in range(2):
        passed.append(0)
        model = rounded_by(tmp_path, LoRA(rank=4), TEXTS)
        layers = [m for m in model.modules() if isinstance(m, kind)]
        eight = [m for layer in layers for m in layer.modules() if _is_eight(m)]
        assert all(m.input_mean.any() for m in eight)
        found.append([as_bytes(m.weight).numpy().tobytes() for m in eight])
        assert not any("forward" in vars(layer) for layer in layers)
        monkeypatch.setattr(calibration, "_is_plain", lambda what: False)
    looked = 6  # at all layers, with one text
    assert passed == [each * len(TEXTS) + looked for each in (passes, 21)]
    assert found[0] == found[1]


def test_a_pass_that_fails_leaves_layers_as_they_were() -> None:
    model = _Model()
    passage = calibration.CalibrationPass(model, list(model.layers), TEXTS, "cpu", torch.bfloat16)
    for layer in model.layers[:2]:
        passage.collect([layer])
    model.layers[2].linear = None
    with pytest.raises(TypeError):
        passage.collect([model.layers[3]])
    for layer in model.layers:
        assert "forward" not in vars(layer)
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks


class _Both(nn.Module):
    """A layer that gives more than one thing to the next, as some models' do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = filled(64, 64, seed)

    def forward(self, x: Tensor, sum_so_far: Tensor | None) -> tuple[Tensor, Tensor]:
        y = self.linear(x if sum_so_far is None else x + sum_so_far)
        return y, 1 * y if sum_so_far is None else y + sum_so_far


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, 64)
        self.layers = nn.ModuleList(map(_Both, range(4)))
        nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(0))

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        x, total = self.embedding(input_ids), None
        for layer in self.layers:
            x, total = layer(x, total)
            x += 1  # nobody says that what a layer gave stays as it is
        return x


def test_all_that_a_layer_gives_is_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[Tensor]] = []
    for _ in range(2):
        model = _Model()
        passage = calibration.CalibrationPass(
            model, list(model.layers), TEXTS, "cpu", torch.bfloat16
        )
        found.append([])
        for layer in model.layers:
            passage.collect([layer])
            found[-1].append(layer.linear.observer.hessian)
            layer.linear.observer = None
        monkeypatch.setattr(calibration, "_is_plain", lambda what: False)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert all(spread.any() for spread in found[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("widths", "room"),
    [
        pytest.param((128, 768), HESSIAN_BUDGET, id="squares, of all layers"),
        pytest.param((256, 256), 1, id="weights, of one layer"),
    ],
)
def test_the_forecast_counts_what_rounding_takes(
    tmp_path: Path, widths: tuple[int, int], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, inner = widths
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2}
    written = write(tmp_path, "qwen2", **sizes)
    written.bfloat16().save_pretrained(tmp_path)
    for module in (calibration, quantized_size):
        monkeypatch.setattr(module, "HESSIAN_BUDGET", room)
    taken: list[int] = []

    def watched(frame: Any, *given: Any) -> None:
        ledger = AllocationLedger("cpu")
        with ledger:
            ledger.adopt(frame.model.parameters())
            before = sum(event.change for event in ledger.events)
            accustom(frame, *given)
        taken.append(sum(ledger.peaks()["building"].values()) - before)

    accustom = parts.Frame.calibrate
    monkeypatch.setattr(parts.Frame, "calibrate", watched)
    rounded_by(tmp_path, LoRA(rank=4), TEXTS)
    told = gptq_bytes(shape_of(ModelSection(name=str(tmp_path))))
    # What the inverse is found in on a GPU is of its library, and nothing that a ledger sees.
    unseen = hessian_bytes(inner) if inner > hidden else 0
    # Small layers also have the errors of a few columns, which are nothing beside large ones.
    assert taken[0] + unseen == pytest.approx(told, rel=0.08)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.filterwarnings("ignore")
def test_a_model_is_rounded_by_texts(
    wide: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its 8-bit layers have what their inputs have in common go through the file's weights, and
    round these by what differs."""
    monkeypatch.setattr(nn.Module, "compile", lambda layer: None)
    model = rounded_by(wide, LoRA(rank=4), TEXTS, kernels=kernels)
    plain = dict(build(wide, "none").named_parameters())
    heard: dict[str, list[Tensor]] = {}

    def listen(module: nn.Module, given: tuple[Tensor, ...], name: str) -> None:
        heard.setdefault(name, []).append(given[0].flatten(0, -2).float())

    other = build(wide, "fp8")  # the same numbers, without having heard anything
    for name, module in other.named_modules():
        if isinstance(module, FP8Linear):
            module.register_forward_pre_hook(lambda m, x, name=name: listen(m, x, name))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for text in TEXTS:
            other(input_ids=torch.tensor([text]))
    nearest = {n: m for n, m in other.named_modules() if type(m) is FP8Linear}
    found = {n: m for n, m in model.named_modules() if type(m) is FP8Linear}
    assert found.keys() == heard.keys()
    assert len(found) == 3 * 7
    better = 0
    for name, layer in found.items():
        x, whole = torch.cat(heard[name]), layer.holder
        # Queries, keys and values are rounded together on the short way, and otherwise apart.
        assert distance(whole.input_mean, x.mean(0).double()) < 0.05
        exact = plain[f"{name}.weight"].float()
        exactly = (exact @ whole.input_mean.float()).to(torch.bfloat16)
        weight, _, to_usual = layer.forward_weights()
        assert torch.equal(to_usual, exactly)
        small = whole.weight.float()
        assert len(whole.outlier_channels) == 16
        assert torch.equal(small[:, -16:], small[:, whole.outlier_channels])
        assert len(weight) == layer.out_features
        right = (x - whole.input_mean.float()).double() @ exact.double().t()
        off = [
            distance((x - whole.input_mean.float()) @ each.dequantize().float().t(), right)
            for each in (layer, nearest[name])
        ]
        better += off[0] < 0.5 * off[1]
        assert (whole.observer, whole.inverse_factor) == (None, None)
    assert better >= 19  # of 21
    assert float(loss_of(model)) == pytest.approx(float(loss_of(build(wide, "none"))), rel=0.03)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["plain", "dora"])
def test_adapters_begin_by_adding_nothing(wide: Path, variant: Any) -> None:
    model = rounded_by(wide, LoRA(rank=4, variant=variant), TEXTS).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model(input_ids=IDS).logits.double()
        with model.disable_adapter():
            expected = model(input_ids=IDS).logits.double()
    assert distance(found, expected) < 0.01


def held_by(world: World, folder: str) -> list[bytes]:
    """What a rank multiplies with, whose texts were others than those of the other ranks."""
    own = [text[: 5 - 2 * world.rank] for text in TEXTS]
    model = rounded_by(Path(folder), LoRA(rank=4), own)
    before = [as_bytes(m.weight).numpy().tobytes() for m in model.modules() if _is_eight(m)]
    setup = EngineSetup("bf16", OptimizerSetup(), Schedule("constant", 1e-3, 0, 9), 1.0, seed=0)
    with DDPEngine(model, setup, world):
        layers = [m for m in model.modules() if _is_eight(m)]
        kept = [
            as_bytes(part).numpy().tobytes()
            for layer in layers
            for part in (layer.weight, layer.outlier_channels, layer.input_mean, layer.mean_output)
        ]
    return [b"".join(before), b"".join(kept)]


def _is_eight(module: nn.Module) -> bool:
    return isinstance(module, FP8Linear)


def test_ranks_have_the_same_weights_even_if_they_were_rounded_otherwise(wide: Path) -> None:
    """Different GPUs may come to different numbers; ranks of one run must not."""
    first, second = on_ranks(2, held_by, str(wide))
    assert first[0] != second[0]
    assert first[1] == second[1]


def test_other_precisions_ask_for_no_texts(folder: Path) -> None:
    def nobody() -> list[list[int]]:
        raise AssertionError

    section = TrainSection(precision="bf16")
    PretrainedModelBuilder(
        ModelFiles(ModelSection(name=str(folder))), LoRA(rank=4), section, nobody
    ).whole("cpu")


# What is said ------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so() -> None:
    told = "frozen weights: stored in fp8, multiplied in bf16, which saves memory but no time"
    assert describe_fp8_matmul("cpu") == f"{told} (there is no GPU)"


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((8, 0), "compute capability 8.0, of 8.9"),
        ((8, 9), "multiplied in fp8"),
        ((9, 0), "multiplied in fp8"),
    ],
)
def test_an_older_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], words: str
) -> None:
    monkeypatch.setattr(fp8.torch.cuda, "get_device_capability", lambda device: capability)
    assert words in describe_fp8_matmul("cuda:0")
