"""Quantized base weights: what is quantized, how well, and that gradients pass through."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardtune.config.job import (
    IA3,
    Adapter,
    DataSection,
    Job,
    LoRA,
    ModelSection,
    NoAdapter,
    TrainSection,
    TrainSource,
)
from shardtune.config.rules import check
from shardtune.core.model.architectures import read_shape
from shardtune.core.model.peft_wrapper import unwrap_name
from shardtune.engine.trained_parameters import base_weights
from shardtune.errors import JobError, ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.bitsandbytes_linear import (
    Int8Linear,
    NF4Linear,
    QuantizedLinear,
    pack_nf4,
    restore_nf4,
)
from tests.models.families import write

IDS = torch.arange(12).view(1, 12) * 5


@pytest.fixture(autouse=True)
def _needs_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")


def build(name: str | Path, kind: str, adapter: Adapter, precision: str = "fp32") -> Any:
    section = ModelSection(name=str(name), quantization=kind)
    return PretrainedModelBuilder(
        ModelFiles(section), adapter, TrainSection(precision=precision)
    ).whole("cpu")


def quantized(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {
        unwrap_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nf4_weights_are_those_of_bitsandbytes(tmp_path: Path, precision: str) -> None:
    """The expected ones come from transformers and bitsandbytes, told the same."""
    import bitsandbytes
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    write(tmp_path, "qwen2", hidden_size=64, intermediate_size=128)
    told = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=told, dtype=dtype, device_map="cpu"
    )
    found = quantized(build(tmp_path, "nf4", LoRA(rank=4), precision))
    expected = {
        name: module
        for name, module in theirs.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }
    assert found.keys() == expected.keys()
    for name, layer in found.items():
        weight = expected[name].weight
        assert torch.equal(layer.weight, weight.data), name
        restored = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(layer.dequantize(), restored), name


def test_nf4_stores_half_a_byte_a_weight() -> None:
    layer = NF4Linear(nn.Linear(64, 256), torch.bfloat16)
    layer.quantize(torch.randn(256, 64))
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.numel() == 256 * 64 // 2
    scales = layer.state.absmax.numel() + 4 * layer.state.state2.absmax.numel()
    assert scales <= layer.weight.numel() / 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 32), (40, 80), (3, 48), (4, 6, 24), (8, 4, 64)], ids=str)
def test_nf4_is_off_by_half_a_gap_at_most(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Blocks of 64 go over the ends of rows, whichever kernel a CPU has for them."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, state = pack_nf4(weight)
    off = (restore_nf4(packed, state.absmax, state) - weight).float().abs().flatten()
    largest = [block.float().abs().amax() for block in weight.flatten().split(64)]
    for block, scale in zip(off.split(64), largest, strict=True):
        assert (block <= 0.17 * scale).all()  # the widest gap is 0.304; scales have 8 bits


@pytest.mark.parametrize(
    ("shape", "shown"), [((40, 80), (50, 64)), ((4, 6, 24), (9, 64)), ((3, 48), (1, 144))]
)
def test_a_kernel_is_shown_no_row_that_ends_inside_a_block(
    shape: tuple[int, ...], shown: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs whose kernel doesn't mind, too."""
    from bitsandbytes import functional

    packed, state = pack_nf4(torch.randn(shape))
    real, seen = functional.dequantize_4bit, []

    def noted(given: Tensor, plain: Any) -> Tensor:
        seen.append(tuple(plain.shape))
        return real(given, plain)

    monkeypatch.setattr(functional, "dequantize_4bit", noted)
    assert restore_nf4(packed, state.absmax, state).shape == shape
    assert seen == [shown]


@pytest.mark.parametrize(
    ("kind", "adapter", "more"),
    [
        ("none", LoRA(rank=4), 0.0),
        ("none", NoAdapter(), 0.0),
        ("nf4", LoRA(rank=4), 0.0),
        ("int8", LoRA(rank=4), 0.02),
        ("fp8", LoRA(rank=4), 0.2),
    ],
)
def test_weights_are_counted_as_the_planner_counts_them(
    kind: str, adapter: Adapter, more: float, tmp_path: Path
) -> None:
    """Both decide by the number which steps are CUDA graphs. Scales that are parameters, one for
    each row of 64 or 128, and what FP8 keeps of some channels in 16 bits are `more`."""
    write(tmp_path, "qwen2", hidden_size=64, intermediate_size=128)
    shape = read_shape(json.loads((tmp_path / "config.json").read_text("utf-8")), "qwen2")
    found = base_weights(build(tmp_path, kind, adapter, "bf16" if kind == "fp8" else "fp32"))
    assert shape.parameters <= found <= shape.parameters * (1 + more)


@pytest.mark.parametrize(("kind", "more"), [("nf4", 0.0), ("fp8", 0.1)])
def test_stacked_experts_are_counted_so_too(kind: str, more: float, tmp_path: Path) -> None:
    """In FP8 they are there once, where linear layers are twice; a scale for 24 or 32 is `more`."""
    write(tmp_path, "qwen3_moe")
    shape = read_shape(json.loads((tmp_path / "config.json").read_text("utf-8")), "qwen3_moe")
    found = base_weights(build(tmp_path, kind, LoRA(rank=4), "bf16" if kind == "fp8" else "fp32"))
    assert shape.parameters <= found <= shape.parameters * (1 + more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_off_by_half_a_unit_at_most(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    layer = Int8Linear(nn.Linear(32, 48), dtype)
    layer.quantize(weight)
    assert layer.weight.dtype == torch.int8
    assert layer.weight.shape == (48, 32)
    unit = weight.abs().amax(1, keepdim=True) / 127
    off = (layer.weight.float() * layer.scale.float() - weight.to(dtype).float()).abs()
    # A scale in bf16 (2^-9) may be smaller than the unit: the largest weight is clipped then.
    assert (off <= unit * (0.501 if dtype == torch.float32 else 0.501 + 127 / 512)).all()


@pytest.mark.parametrize("make", [NF4Linear, Int8Linear])
def test_the_layer_is_the_linear_layer_of_its_restored_weights(
    make: type[QuantizedLinear],
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 32)
    layer = make(plain, torch.float32)
    layer.quantize(plain.weight.detach())
    layer.bias = nn.Parameter(plain.bias.detach(), requires_grad=False)
    one = torch.randn(2, 5, 64, requires_grad=True)
    other = one.detach().clone().requires_grad_()
    expected = nn.functional.linear(other, layer.dequantize(), plain.bias)
    found = layer(one)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_head_and_saved_modules_keep_their_digits(tmp_path: Path, kind: str) -> None:
    write(tmp_path, "llama")
    adapter = LoRA(rank=4, targets=("q_proj",), modules_to_save=("lm_head", "up_proj"))
    names = quantized(build(tmp_path, kind, adapter)).keys()
    assert {name.rsplit(".", 1)[-1] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    }
    assert len(names) == 3 * 6


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(
    "adapter", [LoRA(rank=4), LoRA(rank=4, variant="dora"), IA3()], ids=["lora", "dora", "ia3"]
)
def test_adapters_on_quantized_weights_learn(tmp_path: Path, kind: str, adapter: Adapter) -> None:
    write(tmp_path, "llama")
    model = build(tmp_path, kind, adapter)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(6):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_int8_is_near_the_original_and_nf4_is_farther(tmp_path: Path) -> None:
    logits = {}
    write(tmp_path, "llama")
    for kind in ("none", "int8", "nf4"):
        with torch.no_grad():
            logits[kind] = build(tmp_path, kind, LoRA(rank=4))(IDS).logits
    size = logits["none"].abs().max()
    off = {kind: ((logits[kind] - logits["none"]).abs().max() / size).item() for kind in logits}
    assert 0 < off["int8"] < 0.05 < off["nf4"] < 1


def test_moving_takes_the_scales_along() -> None:
    layer = NF4Linear(nn.Linear(64, 64, bias=False), torch.float32)
    layer.quantize(torch.randn(64, 64))
    layer.to(torch.bfloat16)  # what DeepSpeed does to a module; packed weights are no numbers
    assert layer.weight.dtype == torch.uint8
    assert layer.state.absmax.device == layer.weight.device
    assert layer.state.state2.absmax.dtype == torch.float32


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "gpt2")  # its matrices are of a kind of their own
    with pytest.raises(ModelError, match="no ordinary linear layers"):
        build(tmp_path, "nf4", LoRA(rank=4))


def test_without_bitsandbytes_the_fix_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "llama")
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "bitsandbytes":
            raise ImportError("No module named 'bitsandbytes'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"pip install 'shardtune\[quant\]'"):
        build(tmp_path, "nf4", LoRA(rank=4))


@pytest.mark.parametrize(
    ("adapter", "said"),
    [(NoAdapter(), "can't update quantized weights"), (LoRA(variant="pissa"), "pissa moves")],
)
def test_what_can_not_work_is_refused(adapter: Adapter, said: str) -> None:
    job = Job(
        model=ModelSection(name="tiny", quantization="nf4"),
        adapter=adapter,
        data=DataSection(train=(TrainSource(path="x.jsonl", format="chat", name="x"),)),
    )
    with pytest.raises(JobError, match=said):
        check(job, lambda key: ".".join(map(str, key)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it meets on its way
@pytest.mark.parametrize("make", [NF4Linear, Int8Linear])
def test_compiled_code_keeps_no_restored_weights_for_the_backward_pass(
    make: type[QuantizedLinear],
) -> None:
    """A compiler sees that forward and backward restore the same weights, and would keep them."""
    layer = make(nn.Linear(256, 128, bias=False), torch.bfloat16)
    layer.quantize(torch.randn(128, 256))
    input = torch.randn(4, 256, dtype=torch.bfloat16, requires_grad=True)
    layer(input).sum().backward()
    expected, input.grad = input.grad, None
    torch._dynamo.reset()
    kept: list[torch.Tensor] = []
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        compiled(input).sum().backward()
    assert expected is not None
    assert input.grad is not None
    assert torch.equal(input.grad, expected)
    assert [t for t in kept if t.numel() >= 128 * 256 and t.dtype == torch.bfloat16] == []
