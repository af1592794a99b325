"""Grouped experts, plain, in NF4 and in FP8, are those of transformers and peft, in both passes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from shardtune.compat.quiet import quiet_adapter_warnings
from shardtune.config.job import LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.errors import ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.experts.expert_lora import FactoredParamWrapper
from shardtune.models.experts.grouped_experts import GroupedExperts, rows_align
from shardtune.models.experts.swiglu_experts import fuse_experts
from shardtune.models.load import load_base
from shardtune.models.load_result import load_result
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.fp8_experts import FP8Experts, describe_fp8, quantize_matrices
from shardtune.models.quantization.gptq import E4M3
from shardtune.models.quantization.nf4_experts import NF4Experts
from shardtune.models.quantization.quantized_experts import QuantizedExperts, shown_unpacked
from shardtune.models.quantization.swap import dequantize
from tests.models.families import write

IDS = torch.arange(12).view(1, 12) * 5
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
"""Plain; transposed with biases and a gate of their own; beside shared experts."""


def build(folder: Path, quantization: str) -> Any:
    section = ModelSection(name=str(folder), quantization=quantization)
    builder = PretrainedModelBuilder(
        ModelFiles(section), LoRA(rank=4), TrainSection(precision="fp32")
    )
    model = builder.whole("cpu")
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, which would hide the gradient of A
            nn.init.normal_(parameter, std=0.1, generator=draw)
    return model


def answer(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    logits.square().mean().backward()  # type: ignore[no-untyped-call]
    named = model.named_parameters()
    return logits.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


def as_transformers_has_it(model: Any, *, linears_too: bool = True) -> None:
    """The same weights in the modules of transformers and peft."""
    if linears_too:
        dequantize(model)
    for module in model.modules():
        if isinstance(module, QuantizedExperts):
            module.unpack()
    for module in model.modules():
        if isinstance(module, FactoredParamWrapper):
            module.__class__ = ParamWrapper
        if isinstance(module, GroupedExperts):
            module.__class__ = module.plain_class


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_compute_what_transformers_and_peft_compute(
    family: str, quantization: str, tmp_path: Path
) -> None:
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    write(tmp_path, family)
    model = build(tmp_path, quantization)
    kind = NF4Experts if quantization == "nf4" else GroupedExperts
    assert any(isinstance(each, kind) for each in model.modules()) or family == "gpt_oss"
    found, gradients = answer(model)
    as_transformers_has_it(model)
    expected, right = answer(model)
    assert torch.allclose(found, expected, atol=1e-6)
    assert gradients.keys() == right.keys()
    for name, gradient in right.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp8_they_compute_with_the_weights_that_they_restore(
    family: str, tmp_path: Path
) -> None:
    """Linear layers around them stay in FP8, which rounds their inputs."""
    write(tmp_path, family)
    model = build(tmp_path, "fp8")
    layers = [each for each in model.modules() if isinstance(each, FP8Experts)]
    assert layers
    assert all(each.quantized() == ("gate_up_proj", "down_proj") for each in layers)
    found, gradients = answer(model)
    as_transformers_has_it(model, linears_too=False)
    assert not any(name.endswith("_scales") for name, _ in model.named_parameters())
    expected, right = answer(model)
    assert torch.allclose(found, expected, atol=1e-6)
    assert gradients.keys() == right.keys()
    for name, gradient in right.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_widths_that_grouped_products_do_not_take(
    family: str, quantization: str, tmp_path: Path
) -> None:
    """37 numbers of four bytes are no multiple of 16 bytes, at which torch gives up."""
    inner = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    write(tmp_path, family, **{inner: 37})
    model = build(tmp_path, quantization)
    found, gradients = answer(model)
    as_transformers_has_it(model, linears_too=False)
    expected, right = answer(model)  # an expert after the other, as transformers is told
    assert torch.allclose(found, expected, atol=1e-6)
    assert gradients.keys() == right.keys()
    for name, gradient in right.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6), name


def test_all_weights_of_odd_widths_are_trained_and_loaded(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", moe_intermediate_size=37)
    files = ModelFiles(ModelSection(name=str(tmp_path)))
    model = PretrainedModelBuilder(files, NoAdapter(), TrainSection(precision="fp32")).whole("cpu")
    logits, gradients = answer(model)
    assert gradients["model.layers.0.mlp.experts.down_proj"].any()
    with torch.no_grad():
        loaded = load_base(files, "fp32")(input_ids=IDS).logits
    assert torch.allclose(loaded, logits, atol=1e-6)


def test_which_widths_grouped_products_take() -> None:
    matrix = torch.empty(2, 40, 20)
    assert rows_align(matrix, torch.float32)
    assert not rows_align(matrix, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_fp8_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    """Of three bits behind the point, or of the smallest step. A scale in bf16 (8 bits) may be
    smaller than a row's largest needs, which is clipped then; the restored weight is rounded."""
    weight = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1, 3] = 0
    weight[2] *= 1e-4
    small, scales = quantize_matrices(weight, dtype)
    assert (small.dtype, scales.dtype) == (E4M3, dtype)
    assert scales.shape == (3, 16, 1)
    back = (small.float() * scales.float()).to(dtype).float()
    exact = weight.float()
    assert not back[1, 3].any()
    rounding = 2**-4 if dtype == torch.float32 else 2**-4 + 2**-8
    most = torch.maximum(exact.abs() * rounding, scales.float() * 2**-10)
    assert ((back - exact).abs() <= most * 1.0001).all()


def test_experts_in_fp8_take_a_byte_a_weight(tmp_path: Path) -> None:
    write(tmp_path, "gpt_oss")  # which has its matrices the other way round
    model = build(tmp_path, "fp8")
    layers = [each for each in model.modules() if isinstance(each, FP8Experts)]
    assert len(layers) == 3
    for experts in layers:
        stored, scales = experts.gate_up_proj, experts.gate_up_proj_scales
        assert (stored.dtype, stored.shape) == (E4M3, (4, 2 * 48, 32))
        assert scales.shape == (4, 2 * 48, 1)
        assert experts.plain_shape("gate_up_proj") == (4, 32, 2 * 48)


def test_a_gpu_that_multiplies_in_fp8_does_not_so_with_experts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for family, there in (("qwen3_moe", True), ("qwen3", False)):
        write(tmp_path / family, family)
        told = describe_fp8(build(tmp_path / family, "fp8"), "cuda:0")
        assert ("experts: stored in fp8, multiplied in bf16" in told) == there
        assert "experts" not in describe_fp8(build(tmp_path / family, "fp8"), "cpu")


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("qwen3_moe", "none"), ("deepseek_v3", "none"), ("qwen3_moe", "fp8")],
)
def test_fused_they_compute_the_same(family: str, quantization: str, tmp_path: Path) -> None:
    write(tmp_path, family)
    model = build(tmp_path, quantization)
    expected, right = answer(model)
    fuse_experts(model)
    fused = [each for each in model.modules() if isinstance(each, GroupedExperts)]
    assert fused
    assert all(each.compute_fused is not None for each in fused)
    found, gradients = answer(model)
    assert torch.allclose(found, expected, atol=1e-6)
    assert gradients.keys() == right.keys()
    for name, gradient in right.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6), name


def test_experts_with_a_gate_of_their_own_are_not_fused(tmp_path: Path) -> None:
    write(tmp_path, "gpt_oss")
    model = build(tmp_path, "none")
    fuse_experts(model)
    assert not any(getattr(each, "compute_fused", None) for each in model.modules())


def test_experts_in_nf4_take_half_a_byte_a_weight(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    write(tmp_path, "qwen3_moe")
    layers = [each for each in build(tmp_path, "nf4").modules() if isinstance(each, NF4Experts)]
    assert len(layers) == 3
    for experts in layers:
        packed = experts.gate_up_proj
        assert packed.dtype == torch.uint8
        assert packed.shape == (4, 2 * 24 * 32 // 2)  # a row for each expert


def test_an_adapter_of_experts_in_nf4_is_loaded_as_it_was_trained(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    write(tmp_path / "base", "qwen3_moe")
    model = build(tmp_path / "base", "nf4")
    model.save_pretrained(tmp_path / "result")
    model.generation_config.save_pretrained(tmp_path / "result")
    section = ModelSection(name=str(tmp_path / "base"), quantization="nf4")
    loaded = load_result(str(tmp_path / "result"), ModelFiles(section), "fp32")
    assert any(isinstance(each, NF4Experts) for each in loaded.modules())
    with torch.no_grad():
        found, expected = (each.eval()(input_ids=IDS).logits for each in (loaded, model))
    assert torch.allclose(found, expected, atol=1e-6)


def test_an_adapter_of_experts_in_fp8_belongs_to_the_original_weights(tmp_path: Path) -> None:
    """Logits move by what rounding makes of them, a tenth of the largest here."""
    write(tmp_path / "base", "qwen3_moe")
    model = build(tmp_path / "base", "fp8")
    model.save_pretrained(tmp_path / "result")
    model.generation_config.save_pretrained(tmp_path / "result")
    section = ModelSection(name=str(tmp_path / "base"), quantization="fp8")
    loaded = load_result(str(tmp_path / "result"), ModelFiles(section), "fp32")
    assert not any(isinstance(each, QuantizedExperts) for each in loaded.modules())
    trained = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    for name, parameter in model.named_parameters():
        assert "lora_" not in name or torch.equal(trained[name], parameter), name
    with torch.no_grad():
        found, rounded = (each.eval()(input_ids=IDS).logits for each in (loaded, model))
    assert 0 < (found - rounded).abs().max() < found.abs().max() / 4


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_adapters_that_are_active_together_all_correct(quantization: str, tmp_path: Path) -> None:
    """Of unequal rank and scale; then each alone."""
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    write(tmp_path, "qwen3_moe")
    model = build(tmp_path, quantization)
    known: Any = model.peft_config["default"]
    further = replace(known, r=2, lora_alpha=24, init_lora_weights=False)
    with shown_unpacked(model), torch.random.fork_rng(), warnings.catch_warnings():
        quiet_adapter_warnings()
        torch.manual_seed(3)
        model.add_adapter("further", further)
    together = [["default", "further"], ["further"], ["default"]]
    found = [_with_active(model, names) for names in together]
    as_transformers_has_it(model)
    expected = [_with_active(model, names) for names in together]
    for (mine, gradients), (theirs, right) in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
        assert gradients.keys() == right.keys()
        for name, gradient in right.items():
            assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6), name
    assert not torch.allclose(expected[0][0], expected[2][0], atol=1e-3)


def _with_active(model: Any, names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    model.base_model.set_adapter(names)
    return answer(model)


def test_layers_of_experts_share_a_class(tmp_path: Path) -> None:
    """torch.compile would compile each class anew."""
    write(tmp_path, "qwen3_moe")
    found = [type(each) for each in build(tmp_path, "none").modules()]
    assert len({kind for kind in found if issubclass(kind, GroupedExperts)}) == 1


def test_an_adapter_keeps_no_copy_of_the_experts(tmp_path: Path) -> None:
    """peft's own way saves weights plus correction of each layer for the backward pass."""
    write(tmp_path, "qwen3_moe")
    model = build(tmp_path, "none")
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor.numel()), tensor)[1], lambda tensor: tensor
    ):
        model(input_ids=IDS[:, :2], use_cache=False)
    assert max(saved) < 4 * 2 * 24 * 32  # all experts' first matrices


def test_what_would_leave_experts_in_16_bits_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe")
    with pytest.raises(ModelError, match="would leave the experts"):
        build(tmp_path, "int8")
