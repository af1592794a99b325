"""Merging: the same model in one piece, written for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.checkpoint.export import save_result
from shardtune.checkpoint.merge import merge_adapter
from shardtune.checkpoint.run_dir import RunDir
from shardtune.cli.result_command import ask, merge
from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.errors import RunError
from shardtune.models import tiny
from tests.jobs import make_environment
from tests.synthetic import batch, load_model, make_job, trained

STOPS = frozenset({tiny.END, 10})


def changed(adapter: Adapter) -> Any:
    section, train = ModelSection(name="tiny"), TrainSection(precision="fp32")
    model = load_model(section, adapter, train, device="cpu")
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn(weight.shape, generator=draw)
    return model


def finished_run(folder: Path, adapter: Adapter) -> RunDir:
    """A run directory as training leaves it, as far as merging reads it."""
    run = RunDir(folder)
    run.begin(make_job(str(folder), adapter=adapter.model_dump()), make_environment())
    model = changed(adapter)
    save_result(model, trained(model), tiny.tokens(), STOPS, run.result, dtype=torch.float32)
    return run


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=batch(3).input_ids).logits


def test_the_merged_model_computes_the_same(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", LoRA(rank=4))
    expected = logits(changed(LoRA(rank=4)))
    change = merge(tmp_path / "run", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    # fp32 throughout: only the order of additions differs.
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert 0 <= change < 1e-6
    assert run.result.is_dir()


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
    change = merge_adapter(model, tiny.tokens(), tmp_path / "merged", torch.bfloat16)
    for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name].bfloat16())
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    assert 0 < change < 1e-2


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
