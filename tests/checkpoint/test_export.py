"""The result: others can read it, and damage is noticed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.checkpoint.export import check_result, probe_logits, save_result
from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.errors import ModelError, RunError
from shardtune.models import tiny
from shardtune.models.catalogue import resolve
from shardtune.models.load_result import load_result
from shardtune.models.model_files import ModelFiles
from tests.synthetic import batch, load_model, trained

STOPS = frozenset({tiny.END, 257})
SECTION = ModelSection(name="tiny")
ADAPTERS = {"lora": LoRA(rank=4), "whole": NoAdapter()}


@dataclass(frozen=True)
class Saved:
    """A model that was changed as training would, and the folder that it was saved to."""

    model: Any
    folder: Path
    written: torch.dtype

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        found = self.model.named_parameters()
        return {name: weight.detach() for name, weight in found if weight.requires_grad}

    @property
    def weights(self) -> Path:
        return next(self.folder.glob("*.safetensors"))

    def reload(self, precision: Any = "fp32") -> Any:
        return load_result(str(self.folder), ModelFiles(SECTION), precision)

    def check(self, reloaded: Any) -> float:
        logits = probe_logits(self.model, batch(5))
        return check_result(reloaded, self.trained, logits, batch(5), written=self.written)

    @torch.no_grad()
    def logits(self, model: Any) -> torch.Tensor:
        return model.eval()(input_ids=batch(5).input_ids).logits.float()


def saved(
    folder: Path, adapter: Adapter, *, dtype: torch.dtype = torch.float32, precision: Any = "fp32"
) -> Saved:
    model = load_model(SECTION, adapter, TrainSection(precision=precision), device="cpu")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.02 * torch.randn(weight.shape, generator=draw)
    target = folder / "result"
    weights = trained(model)
    written = save_result(model, weights, tiny.tokens(), STOPS, target, dtype=dtype)
    return Saved(model, target, written)


@pytest.fixture(params=["lora", "whole"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Saved:
    return saved(tmp_path, ADAPTERS[request.param])


def test_plain_peft_reads_an_adapter(tmp_path: Path) -> None:
    result = saved(tmp_path, LoRA(rank=4))
    base = AutoModelForCausalLM.from_pretrained(resolve("tiny"))
    untrained = result.logits(base)
    adapted = PeftModel.from_pretrained(base, result.folder)
    assert torch.equal(result.logits(adapted), result.logits(result.model))
    assert not torch.allclose(untrained, result.logits(adapted), atol=1e-3)
    # The adapter knows its model by itself.
    found = AutoPeftModelForCausalLM.from_pretrained(result.folder)
    assert torch.equal(result.logits(found), result.logits(result.model))


@pytest.mark.slow
def test_plain_transformers_reads_a_whole_model(tmp_path: Path) -> None:
    result = saved(tmp_path, NoAdapter())
    model = AutoModelForCausalLM.from_pretrained(result.folder)
    assert torch.equal(result.logits(model), result.logits(result.model))
    assert model.config.use_cache


def test_the_folder_has_what_a_reader_needs(either: Saved) -> None:
    tokenizer = AutoTokenizer.from_pretrained(either.folder)
    asked = [{"role": "user", "content": "größer?"}]
    ours = tiny.tokens().apply_chat_template(asked, add_generation_prompt=True)
    theirs = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    assert dict(ours) == dict(theirs)
    generation = json.loads((either.folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == sorted(STOPS)
    assert generation["pad_token_id"] == tiny.PAD


def test_weights_are_safetensors_and_nothing_else(either: Saved) -> None:
    kinds = {path.suffix for path in either.folder.rglob("*")}
    assert ".safetensors" in kinds
    assert kinds <= {".safetensors", ".json", ".jinja", ".md"}


def test_saving_leaves_the_model_as_it_was(either: Saved) -> None:
    assert either.model.generation_config.eos_token_id == tiny.END


def test_it_comes_back_without_a_difference(either: Saved) -> None:
    assert either.check(either.reload()) == 0.0


def test_a_probe_of_packed_documents_is_asked_as_one() -> None:
    """Somebody's own copy of a family may not keep them apart, as training does."""
    model = load_model(SECTION, NoAdapter(), TrainSection(precision="fp32"), device="cpu")
    row = batch(5)
    positions = torch.arange(row.position_ids.shape[1])[None].expand_as(row.position_ids) % 3
    packed = replace(row, position_ids=positions)
    assert torch.equal(probe_logits(model, packed), probe_logits(model, row))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_adapter_of_a_16_bit_model_comes_back(tmp_path: Path, precision: Any) -> None:
    result = saved(tmp_path, LoRA(rank=4), precision=precision)
    assert {tensor.dtype for tensor in load_file(result.weights).values()} == {torch.float32}
    assert result.check(result.reload(precision)) == 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_whole_model_is_written_in_its_own_precision(tmp_path: Path, precision: Any) -> None:
    """Trained in fp32, on disk in bf16: what is compared is what rounding leaves."""
    result = saved(tmp_path, NoAdapter(), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(result.weights).values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(result.folder).dtype == torch.bfloat16
    assert 0 < result.check(result.reload(precision)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tied_embeddings_are_written_once(tmp_path: Path, dtype: torch.dtype) -> None:
    result = saved(tmp_path, NoAdapter(), dtype=dtype)
    stored = load_file(result.weights)
    assert "model.embed_tokens.weight" in stored
    assert "lm_head.weight" not in stored
    model = AutoModelForCausalLM.from_pretrained(result.folder)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_changed_tensor_is_refused(either: Saved) -> None:
    tensors = load_file(either.weights)
    name = sorted(tensors)[len(tensors) // 2]
    tensors[name].view(-1)[3] += 1e-3
    save_file(tensors, either.weights, metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"read back from disk, .* differs from what was trained"):
        either.check(either.reload())


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # peft's, and it goes on
def test_a_missing_tensor_is_refused(either: Saved) -> None:
    tensors = load_file(either.weights)
    del tensors[sorted(tensors)[len(tensors) // 2]]
    save_file(tensors, either.weights, metadata={"format": "pt"})
    with pytest.raises((RunError, ModelError), match=r"differs from what was trained|are missing:"):
        either.check(either.reload())


@pytest.mark.parametrize("size", [0, 100])
def test_an_empty_or_truncated_file_is_refused(either: Saved, size: int) -> None:
    either.weights.write_bytes(either.weights.read_bytes()[:size])
    with pytest.raises(ModelError, match="can't be loaded"):
        either.reload()


def test_a_missing_file_is_refused(either: Saved) -> None:
    either.weights.unlink()
    with pytest.raises(ModelError, match="can't be loaded"):
        either.reload()


def test_another_adapter_is_refused(tmp_path: Path) -> None:
    wide, narrow = (
        saved(tmp_path / str(rank), LoRA(rank=rank, targets=("q_proj",))) for rank in (8, 4)
    )
    with pytest.raises(RunError, match="differs from what was trained"):
        wide.check(narrow.reload())
    every = saved(tmp_path / "every", LoRA(rank=8))
    # Of 14 linear layers (7 in each of 2) only the 2 called q_proj have a pair of weights.
    with pytest.raises(RunError, match=r"24 of 28 weights are missing, first .*down_proj"):
        every.check(wide.reload())


def test_logits_that_differ_are_refused(tmp_path: Path) -> None:
    """The trained weights are right, but the model that they belong to isn't."""
    result = saved(tmp_path, LoRA(rank=4))
    reloaded = result.reload()
    with torch.no_grad():
        reloaded.get_input_embeddings().weight[:, 0] += 0.1
    with pytest.raises(RunError, match="its logits differ by"):
        result.check(reloaded)
    with torch.no_grad():
        reloaded.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(RunError, match="its logits differ by nan"):
        result.check(reloaded)


def test_a_second_result_replaces_the_first(tmp_path: Path) -> None:
    """A run that was stopped saves its result; resumed, it saves another."""
    first = saved(tmp_path, NoAdapter())
    (first.folder / "stale.json").touch()
    second = saved(tmp_path, LoRA(rank=4))
    assert second.folder == first.folder
    assert not (second.folder / "stale.json").exists()
    assert not (second.folder / "model.safetensors").exists()
    assert second.check(second.reload()) == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
