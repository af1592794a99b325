"""Quantized runs as they were trained: what plain transformers reads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.checkpoint.merge import tokenize_prompts
from shardtune.cli.main import main
from shardtune.config.job import IA3, LoRA, ModelSection
from shardtune.core.setup import Precision, Quantization
from shardtune.errors import ModelError, RunError
from shardtune.export.hf_stored_export import export_stored
from shardtune.export.source import ExportSource
from shardtune.export.stored_read_back import (
    compare_stored,
    known_cause,
    load_stored_folder,
    require_same_weights,
)
from shardtune.models.load_result import load_result, load_stored, load_to_merge
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.bitsandbytes_layers import to_bitsandbytes
from shardtune.models.quantization.bitsandbytes_linear import Int8Linear, QuantizedLinear
from tests.export.tuned import PROMPTS, finished
from tests.models.encoder_decoder import write as write_encoder_decoder

pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nf4(tmp_path_factory: pytest.TempPathFactory) -> ExportSource:
    return finished(tmp_path_factory.mktemp("nf4"), quantization="nf4")


def own_layers(source: ExportSource) -> dict[str, QuantizedLinear]:
    """The quantized layers as the run has them."""
    model = load_stored(source.files, source.job.train.compute_precision)
    found = model.named_modules()
    return {name: each for name, each in found if isinstance(each, QuantizedLinear)}


def bitsandbytes_weights(model: Any) -> dict[str, Any]:
    """Those that transformers holds in bitsandbytes' layers, by the names without an adapter."""
    import bitsandbytes as bnb

    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return {
        name.removesuffix(".base_layer"): module.weight
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    }


@pytest.mark.parametrize(
    ("quantization", "precision", "adapter"),
    [
        ("nf4", "fp32", LoRA(rank=4, targets=("q_proj", "down_proj"))),
        ("nf4", "bf16", LoRA(rank=4)),
        ("nf4", "fp32", IA3()),
        ("nf4", "fp32", LoRA(rank=4, modules_to_save=("lm_head",))),
        ("int8", "fp32", LoRA(rank=4)),
        ("int8", "bf16", LoRA(rank=4)),
    ],
)
def test_plain_transformers_reads_the_run(
    quantization: Quantization, precision: Precision, adapter: LoRA | IA3, tmp_path: Path
) -> None:
    import bitsandbytes as bnb

    source = finished(tmp_path, "llama", adapter, quantization=quantization, precision=precision)
    found = export_stored(source, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu").eval()
    own, theirs = own_layers(source), bitsandbytes_weights(model)
    assert found.layers == len(own)
    assert own.keys() == theirs.keys()
    for name, layer in own.items():
        assert torch.equal(theirs[name].data, layer.weight), name
        if isinstance(layer, Int8Linear):
            assert torch.equal(theirs[name].SCB, 127 * layer.scale.float().flatten()), name
        else:
            restored = bnb.functional.dequantize_4bit(theirs[name].data, theirs[name].quant_state)
            assert torch.equal(restored, layer.dequantize()), name
    assert model.active_adapters() == ["default"]
    if precision == "fp32":
        ids = torch.tensor([source.tokenizer(PROMPTS[0])["input_ids"]])
        trained = load_result(str(source.run.result), source.files, precision).eval()
        model.train()  # else bitsandbytes multiplies in bf16 where the CPU has AVX512-BF16
        with torch.no_grad():
            off = (model(ids).logits - trained(ids).logits).abs().max().item()
        assert off <= found.read_back.logits.bound
        if quantization == "nf4":
            assert off < 1e-4


def test_the_folder_says_what_it_is(nf4: ExportSource, tmp_path: Path) -> None:
    target = tmp_path / "out"
    export_stored(nf4, target)
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert config["load_in_4bit"]
    assert config["bnb_4bit_quant_type"] == "nf4"
    assert config["llm_int8_skip_modules"] == ["lm_head"]
    facts = json.loads((target / "export.json").read_text())
    assert (facts["to"], facts["weights"]) == ("hf", "nf4")
    card = (target / "README.md").read_text()
    assert "adapter beside the nf4 weights of base" in card
    assert "download the folder first" in card
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.chat_template == nf4.tokenizer.chat_template
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [2]
    base = str(nf4.files.path)
    assert all(base not in path.read_text() for path in target.glob("*.json"))


@pytest.mark.parametrize("spoiled", ["codes", "scales", "adapter", "strength"])
def test_a_spoiled_folder_is_refused(spoiled: str, nf4: ExportSource, tmp_path: Path) -> None:
    target = tmp_path / "out"
    export_stored(nf4, target)
    file = "adapter_model.safetensors" if spoiled == "adapter" else "model.safetensors"
    weights = load_file(target / file)
    ending = {"codes": "up_proj.weight", "scales": "up_proj.weight.absmax"}.get(spoiled)
    chosen = next(name for name in weights if ending is None or name.endswith(ending))
    if spoiled == "strength":
        settings = json.loads((target / "adapter_config.json").read_text())
        settings["lora_alpha"] *= 2
        (target / "adapter_config.json").write_text(json.dumps(settings))
    elif spoiled == "adapter":
        weights[chosen] *= 1.001
    else:
        weights[chosen].view(-1)[0] ^= 1
    save_file(weights, target / file, {"format": "pt"})

    base = load_stored(nf4.files, "fp32")
    layers = to_bitsandbytes(base, "x", "y")
    adapted = load_to_merge(str(nf4.run.result), nf4.files, "fp32")
    back = load_stored_folder(target, base.config, trust_remote_code=False)
    if spoiled != "strength":
        with pytest.raises(RunError, match=rf"{chosen.split('.')[-2]}.* isn't what was written"):
            require_same_weights(back, base, adapted)
        return
    require_same_weights(back, base, adapted)
    inputs = tokenize_prompts(nf4.tokenizer, PROMPTS, adapted)
    with pytest.raises(RunError, match=r"logits differ by .*; rounding explains"):
        compare_stored(back, adapted, layers, inputs, torch.float32)


def test_a_run_without_quantized_weights_is_refused(source: ExportSource, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"its model\.quantization is none\n +fix: leave out"):
        export_stored(source, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_magnitudes_of_dora_are_refused(tmp_path: Path) -> None:
    """transformers 5.23 looks for them under another name than peft writes, and draws them anew."""
    source = finished(tmp_path / "run", adapter=LoRA(rank=4, variant="dora"), quantization="nf4")
    with pytest.raises(RunError, match="magnitudes of DoRA"):
        export_stored(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_whole_weights_for_a_quantized_layer_are_refused(tmp_path: Path) -> None:
    adapter = LoRA(rank=4, targets=("q_proj",), modules_to_save=("up_proj",))
    source = finished(tmp_path / "run", "llama", adapter, quantization="nf4")
    with pytest.raises(RunError, match=r"whole weights .*up_proj\n +fix: .*leave out"):
        export_stored(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    source = finished(tmp_path / "run", "mixtral", LoRA(rank=4), quantization="nf4")
    with pytest.raises(ModelError, match=r"experts lie stacked .*: \d+, first model\.layers"):
        export_stored(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_that_transformers_keeps_wide_are_refused(tmp_path: Path) -> None:
    write_encoder_decoder(tmp_path, "t5")
    section = ModelSection(name=str(tmp_path), quantization="nf4")
    model = load_stored(ModelFiles(section), "fp32")
    with pytest.raises(ModelError, match=r"keeps layers in fp32 .*\.wo"):
        to_bitsandbytes(model, "--as-stored", "leave it out")
    assert getattr(model.config, "quantization_config", None) is None


def test_the_command(nf4: ExportSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, target = str(nf4.run.path), str(tmp_path / "out")
    assert main(["export", run, "--to", "hf", target, "--as-stored"]) == 0
    said = capsys.readouterr().out
    assert "other weights and the adapter as written, bit by bit" in said
    assert "100.0% of next tokens are the same" in said
    assert main(["verify", target]) == 0
    assert main(["export", run, "--to", "hf", target, "--as-stored", "--dtype", "bf16"]) == 2
    assert "not in bf16" in capsys.readouterr().err
    assert main(["export", run, "--to", "gguf", target, "--as-stored"]) == 2
    assert "--as-stored: is an option of hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("width", "cpu", "told"),
    [(96, "AVX512", "as 96 here"), (128, "AVX512", ""), (96, "AVX2", "")],
)
def test_a_wrong_kernel_of_the_cpu_is_named(
    width: int, cpu: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes as bnb

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    found = known_cause(torch.nn.Sequential(bnb.nn.Linear4bit(width, 64)))
    assert told in found
    assert bool(found) == bool(told)
