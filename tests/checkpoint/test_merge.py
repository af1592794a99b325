"""Merging: the same model in one piece, written for others."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants as hub_constants
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.checkpoint import merge as rounding_of_merges
from shardtune.checkpoint.base_files import leave_base
from shardtune.checkpoint.export import save_result
from shardtune.checkpoint.merge import (
    compare_merged,
    merge_adapter,
    require_read_back,
    round_weights,
    tokenize_prompts,
)
from shardtune.checkpoint.rounding_error import Rounding, fp32_logits, rounding_bound
from shardtune.checkpoint.run_dir import RunDir
from shardtune.cli.result_command import ask, merge
from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.errors import RunError
from shardtune.models import load_result as load_result_module
from shardtune.models import tiny
from shardtune.models.load import COMPUTE_DTYPES
from shardtune.models.load_result import load_result
from shardtune.models.model_files import PROCESSOR_FILES, ModelFiles
from tests.jobs import make_environment
from tests.models import families
from tests.models.encoder_decoder import write as write_encoder_decoder
from tests.synthetic import batch, load_model, make_job, trained

STOPS = frozenset({tiny.END, 10})


FP32 = TrainSection(precision="fp32")
TINY = ModelSection(name="tiny")


def changed(
    adapter: Adapter, section: ModelSection = TINY, train: TrainSection = FP32
) -> torch.nn.Module:
    model = load_model(section, adapter, train, device="cpu")
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn(weight.shape, generator=draw)
    return model


def finished_run(
    folder: Path, adapter: Adapter, section: ModelSection = TINY, train: TrainSection = FP32
) -> RunDir:
    """A run directory as training leaves it, as far as merging reads it."""
    run = RunDir(folder)
    sections = {
        "adapter": adapter.model_dump(mode="json"),
        "model": section.model_dump(mode="json"),
    }
    job = make_job(str(folder), train={"precision": train.precision}, **sections)
    run.begin(job, make_environment())
    model = changed(adapter, section, train)
    save_result(model, trained(model), tiny.tokens(), STOPS, run.result, dtype=torch.float32)
    return run


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=batch(3).input_ids).logits


def test_the_merged_model_computes_the_same(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", LoRA(rank=4))
    expected = logits(changed(LoRA(rank=4)))
    found = merge(tmp_path / "run", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    # fp32 throughout: only the order of additions differs.
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert 0 <= found.merged.found <= found.merged.bound < 1e-4
    assert found.rounded.found == 0, "the files are fp32, and so is what is written"
    assert run.result.is_dir()


def test_an_adapted_head_is_merged_apart_from_the_embedding(tmp_path: Path) -> None:
    """Both are one weight of the tiny model; the adapter corrects what comes out of it alone."""
    adapter = LoRA(rank=4, targets=("q_proj", "lm_head"))
    finished_run(tmp_path / "run", adapter)
    expected = logits(changed(adapter))
    merge(tmp_path / "run", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_no_work_is_done_for_a_place_where_no_folder_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path / "run", LoRA(rank=4))
    (tmp_path / "file").touch()
    monkeypatch.setattr(load_result_module, "load_to_merge", lambda *_: pytest.fail("loaded"))
    with pytest.raises(RunError, match="no folder can be made"):
        merge(tmp_path / "run", tmp_path / "file" / "merged")


def seeing_model(folder: Path) -> ModelFiles:
    """A model that takes pictures, and what prepares them as it is published."""
    families.write(folder, "mistral3")
    tiny.tokens().save_pretrained(folder)
    size = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(size))
    whole = {
        "processor_class": "PixtralProcessor",
        "chat_template": "of its own",
        "at": str(folder),
    }
    (folder / "processor_config.json").write_text(json.dumps(whole))
    return ModelFiles(ModelSection(name=str(folder)))


def processor_of(folder: Path) -> dict[str, Any]:
    """Its files on pictures, by name."""
    found = (folder / name for name in PROCESSOR_FILES)
    return {file.name: json.loads(file.read_text()) for file in found if file.is_file()}


def test_a_model_that_sees_keeps_what_prepares_its_pictures(tmp_path: Path) -> None:
    """Servers ask a folder with all weights for it; an adapter's base has it. The tokenizer has the
    chat template by which was trained, and the folder of the base concerns nobody else."""
    base = seeing_model(tmp_path / "seeing")
    run = finished_run(tmp_path / "run", LoRA(rank=4), base.section)
    merge(tmp_path / "run", tmp_path / "merged")
    assert processor_of(tmp_path / "merged") == {
        "preprocessor_config.json": processor_of(tmp_path / "seeing")["preprocessor_config.json"],
        "processor_config.json": {"processor_class": "PixtralProcessor", "at": "seeing"},
    }
    assert processor_of(run.result) == {}

    whole, target = changed(NoAdapter(), base.section), tmp_path / "whole"
    save_result(whole, trained(whole), tiny.tokens(), STOPS, target, dtype=torch.float32, base=base)
    assert processor_of(target) == processor_of(tmp_path / "merged")


def test_what_was_trained_for_text_alone_prepares_no_pictures(tmp_path: Path) -> None:
    base = seeing_model(tmp_path / "seeing")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    leave_base(tmp_path / "text", base)
    assert processor_of(tmp_path / "text") == {}


def test_what_cannot_be_fetched_of_a_processor_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
    told = io.StringIO()
    handler = logging.StreamHandler(told)  # the root's may write to what pytest has closed
    log = logging.getLogger("shardtune")
    log.addHandler(handler)
    try:
        assert ModelFiles(ModelSection(name="nobody/has-this")).processor == ()
    finally:
        log.removeHandler(handler)
    assert "to serve pictures, bring preprocessor_config.json" in told.getvalue()


RUNS = {
    "fp32": (TINY, FP32),
    "bf16": (TINY, TrainSection(precision="bf16")),
    "nf4": (ModelSection(name="tiny", quantization="nf4"), TrainSection(precision="bf16")),
    "int8": (ModelSection(name="tiny", quantization="int8"), FP32),
}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", RUNS)
def test_merges_keep_what_was_trained(tmp_path: Path, kind: str, dtype: Any) -> None:
    """Loaded by plain transformers, logits are those of the adapter within the stated bounds."""
    section, train = RUNS[kind]
    run = finished_run(tmp_path / "run", LoRA(rank=4), section, train)
    found = merge(tmp_path / "run", tmp_path / "merged", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert model.dtype == COMPUTE_DTYPES[dtype]
    asked = tokenize_prompts(tiny.tokens(), ["Once upon a time"], model)
    packed = section.quantization != "none"
    precision = train.precision if packed else "fp32"
    adapter = load_result(str(run.result), ModelFiles(section), precision)
    expected = fp32_logits(adapter, asked)
    # A quantized layer computes in the precision of training, wherever it is.
    computed = Rounding(results=COMPUTE_DTYPES[precision])
    stated = found.merged.bound + found.rounded.bound
    if packed:
        stated += rounding_bound(model, asked, expected, computed)
    assert (fp32_logits(model, asked) - expected).abs().max().item() <= stated
    assert found.rounded.bound < 0.2, "the bound is no licence: logits reach 0.6 here"


@pytest.mark.slow
def test_a_quantized_run_is_merged_into_the_weights_it_was_trained_on(tmp_path: Path) -> None:
    section, train = RUNS["nf4"]
    finished_run(tmp_path / "run", LoRA(rank=4), section, train)
    merge(tmp_path / "run", tmp_path / "merged", dtype="fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    apart = fp32_logits(changed(LoRA(rank=4)), [{"input_ids": batch(3).input_ids}])
    near = fp32_logits(changed(LoRA(rank=4), section, train), [{"input_ids": batch(3).input_ids}])
    mine = fp32_logits(model, [{"input_ids": batch(3).input_ids}])
    assert 5 * (mine - near).abs().max() < (mine - apart).abs().max()


def _half_the_scale(model: Any) -> None:
    for layer in _layers(model):
        layer.scaling["default"] /= 2


def _one_layer_omitted(model: Any) -> None:
    _layers(model)[3].lora_B["default"].weight.data.zero_()


def _two_layers_swapped(model: Any) -> None:
    one, two = (model.get_submodule(_named("q_proj", n)).lora_B["default"].weight for n in (0, 1))
    one.data, two.data = two.data, one.data


def _transposed(model: Any) -> None:
    layer = model.get_submodule(_named("o_proj", 0))
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = (
        layer.lora_B["default"].weight.data.T.contiguous(),
        layer.lora_A["default"].weight.data.T.contiguous(),
    )


def _not_a_number(model: Any) -> None:
    _layers(model)[0].lora_B["default"].weight.data[0, 0] = float("nan")


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _named(projection: str, layer: int) -> str:
    return f"base_model.model.model.layers.{layer}.self_attn.{projection}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [_half_the_scale, _one_layer_omitted, _two_layers_swapped, _transposed, _not_a_number],
)
def test_a_spoiled_merge_is_refused(spoil: Any) -> None:
    """Even where the adapter says little: rounding in fp32 is far smaller than that."""
    asked = [{"input_ids": batch(3).input_ids}]
    good, other = changed(LoRA(rank=4)), changed(LoRA(rank=4))
    for model in (good, other):
        for layer in _layers(model):
            layer.scaling["default"] /= 20
    adapted = fp32_logits(good, asked)
    spoil(other)
    with pytest.raises(RunError, match="answers otherwise than with its adapter"):
        compare_merged(adapted, other.merge_and_unload(), asked)
    found = compare_merged(adapted, good.merge_and_unload(), asked)
    assert found.found <= found.bound


def test_a_weight_beyond_the_range_of_fp16_is_refused(tmp_path: Path) -> None:
    model = changed(LoRA(rank=4))
    model.base_model.model.model.norm.weight.data[0] = 1e5
    with pytest.raises(RunError, match=r"model.norm.weight has a weight of 1e\+05") as caught:
        merge_adapter(model, tiny.tokens(), tmp_path / "merged", torch.float16, [])
    assert "bf16 or fp32" in caught.value.problems[0].fix
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_with_an_encoder_are_rounded_within_the_bound(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """T5's feed-forward looks at the dtype of a weight before it calls the layer that has it."""
    model = write_encoder_decoder(tmp_path, family).eval()
    row = batch(3).input_ids[:1]
    asked = [{"input_ids": row, "decoder_input_ids": row[:, :4]}]
    wide = fp32_logits(model, asked)
    found = round_weights(model, asked, dtype)
    assert 0 < found.found <= found.bound
    assert model.get_output_embeddings().weight.dtype == dtype
    assert torch.equal(wide, fp32_logits(write_encoder_decoder(tmp_path, family).eval(), asked))


def test_weights_that_more_than_rounding_has_moved_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounding_of_merges, "rounding_bound", lambda *_: 0.0)
    asked = [{"input_ids": batch(3).input_ids}]
    with pytest.raises(RunError, match="rounded to bfloat16, logits differ by") as caught:
        round_weights(changed(NoAdapter()), asked, torch.bfloat16)
    assert caught.value.problems[0].fix == "write it with --dtype fp32"


def test_other_weights_on_the_disk_are_refused(tmp_path: Path) -> None:
    merged = changed(LoRA(rank=4)).merge_and_unload()
    merged.save_pretrained(tmp_path)
    require_read_back(merged, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-6
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"layers.1.mlp.up_proj.weight differs"):
        require_read_back(merged, tmp_path)


def test_the_merged_folder_is_an_ordinary_model(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", LoRA(rank=4))
    merge(tmp_path / "run", tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert stored.keys() == tiny.weights().keys()  # no adapter, no second copy of the embedding
    assert not list((tmp_path / "merged").glob("adapter*"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer("größer")["input_ids"] == tiny.tokens()("größer")["input_ids"]
    generation = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == sorted(STOPS), "where the answers learned to end"


def test_the_merged_model_is_rounded_once_to_its_own_precision(tmp_path: Path) -> None:
    model = changed(LoRA(rank=4))
    expected = changed(LoRA(rank=4)).merge_and_unload().state_dict()
    found = merge_adapter(model, tiny.tokens(), tmp_path / "merged", torch.bfloat16, ["Once"])
    for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name].bfloat16())
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    assert 0 < found.rounded.found <= found.rounded.bound < 0.2
    assert found.dtype == "bfloat16"


def test_an_existing_target_is_refused_and_left_alone(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", LoRA(rank=4))
    (tmp_path / "merged").mkdir()
    with pytest.raises(RunError, match="exists already") as caught:
        merge(tmp_path / "run", tmp_path / "merged")
    assert caught.value.problems[0].place == str(tmp_path / "merged")
    assert list((tmp_path / "merged").iterdir()) == []


def test_a_run_of_all_weights_has_nothing_to_merge(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", NoAdapter())
    with pytest.raises(RunError, match="there is no adapter to merge") as caught:
        merge(tmp_path / "run", tmp_path / "merged")
    assert str(run.result) in caught.value.problems[0].fix
    assert not (tmp_path / "merged").exists()


def test_a_run_without_a_result_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.begin(make_job(str(tmp_path / "run"), adapter={"type": "lora"}), make_environment())
    with pytest.raises(RunError, match="the run has no result") as caught:
        merge(tmp_path / "run", tmp_path / "merged")
    assert caught.value.problems[0].fix.endswith(f"shardtune train {run.job} --resume")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run directory"):
        merge(tmp_path, tmp_path / "merged")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [LoRA(rank=4), NoAdapter()], ids=["lora", "whole"])
def test_a_result_can_be_asked(tmp_path: Path, adapter: Adapter) -> None:
    run = finished_run(tmp_path / "run", adapter)
    settings: Any = {"max_new_tokens": 12, "temperature": 0.0}
    said = ask(run.path, "Say it.", raw=False, **settings)
    assert said == ask(run.path, "Say it.", raw=False, **settings)
    asked = tiny.tokens().apply_chat_template(
        [{"role": "user", "content": "Say it."}], tokenize=False, add_generation_prompt=True
    )
    assert said == ask(run.path, asked, raw=True, **settings)
    assert said != ask(run.path, "Say it.", raw=True, **settings)
