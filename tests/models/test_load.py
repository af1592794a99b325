"""Loading: precision, attention, what is refused, and where answers end."""

from __future__ import annotations

import json
import shutil
from functools import partial
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.errors import ModelError
from shardtune.models import tiny
from shardtune.models.catalogue import resolve
from shardtune.models.load import check_fits_data, load_base
from shardtune.models.model_files import ModelFiles, explaining
from shardtune.serve.sampling_defaults import sampling_defaults
from tests.no_hub import lose_hub
from tests.synthetic import load_model

TINY = ModelSection(name="tiny")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny, to be spoilt."""
    return Path(shutil.copytree(resolve("tiny"), tmp_path / "model"))


def section(folder: Path, **changes: Any) -> ModelSection:
    return ModelSection(name=str(folder), **changes)


def edit(path: Path, **changes: Any) -> None:
    found = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(found), encoding="utf-8")


def problem(caught: pytest.ExceptionInfo[ModelError]) -> Any:
    (found,) = caught.value.problems
    return found


# Precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("adapter", [LoRA(rank=2), NoAdapter()], ids=["lora", "whole"])
def test_what_is_trained_is_fp32_and_what_is_frozen_is_small(
    adapter: Adapter, precision: Any
) -> None:
    model = load_model(TINY, adapter, TrainSection(precision=precision), device="cpu")
    found: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for weight in model.parameters():
        found[weight.requires_grad].add(weight.dtype)
    frozen = {HALF.get(precision, torch.float32)} if isinstance(adapter, LoRA) else set()
    assert found == {True: {torch.float32}, False: frozen}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_files_say_what_they_are_written_in(folder: Path, dtype: str) -> None:
    edit(folder / "config.json", dtype=dtype)
    assert ModelFiles(section(folder)).dtype == getattr(torch, dtype)


def test_files_that_do_not_say_are_fp32(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert ModelFiles(section(folder)).dtype == torch.float32


def test_gradient_checkpointing_is_switched_on(tmp_path: Path) -> None:
    for wanted in ("none", "full"):
        train = TrainSection(precision="fp32", gradient_checkpointing=wanted)
        model: Any = load_model(TINY, LoRA(rank=2), train, device="cpu")
        assert model.is_gradient_checkpointing is (wanted == "full")


# Which model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_that_was_chosen(attention: Any) -> None:
    chosen = ModelSection(name="tiny", attention=attention)
    model: Any = load_model(chosen, LoRA(rank=2), TrainSection(precision="fp32"), device="cpu")
    assert model.config._attn_implementation == attention


def test_a_folder_is_loaded_as_the_built_in_model_is(folder: Path) -> None:
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = (
            load_base(ModelFiles(each), "fp32")(ids).logits for each in (TINY, section(folder))
        )
    assert torch.equal(ours, theirs)


def hub(cache: Path, *revisions: str) -> None:
    """A cache of the hub with one model, whose revisions are told apart by their longest row."""
    repository = cache / "models--org--model"
    for number, revision in enumerate(revisions):
        commit = f"{number:040x}"
        copied = repository / "snapshots" / commit
        shutil.copytree(resolve("tiny"), copied)
        edit(copied / "config.json", max_position_embeddings=100 + number)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)


def test_a_revision_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(tmp_path, "main", "v2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    main, second = ModelSection(name="org/model"), ModelSection(name="org/model", revision="v2")
    assert ModelFiles(main).config.max_position_embeddings == 100
    assert ModelFiles(second).config.max_position_embeddings == 101
    assert load_base(ModelFiles(second), "fp32").config.max_position_embeddings == 101
    assert ModelFiles(second).tokenizer("a")["input_ids"] == [97]
    assert ModelFiles(second).stop_ids == {tiny.END}
    with pytest.raises(ModelError, match="'org/model' can't be loaded"):
        _ = ModelFiles(ModelSection(name="org/model", revision="v3")).config


def test_a_hub_without_an_address_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own client would retry for 24 s, for each file."""
    hub(tmp_path, "main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    lose_hub(monkeypatch)
    begun = monotonic()
    cached = ModelFiles(ModelSection(name="org/model"))
    assert cached.tokenizer("a")["input_ids"] == [97]
    assert load_base(cached, "fp32").config.max_position_embeddings == 100
    with pytest.raises(ModelError, match="'nobody/nothing' can't be loaded"):
        _ = ModelFiles(ModelSection(name="nobody/nothing")).config
    assert monotonic() - begun < 15


# What is refused ---------------------------------------------------------------------------------


def test_code_of_others_is_refused(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('this was run')")
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert ModelFiles(section(folder)).config.model_type == "llama"  # known without that code
    edit(folder / "config.json", model_type="evil")
    for load in (attrgetter("config"), attrgetter("dtype"), partial(load_base, precision="fp32")):
        with pytest.raises(ModelError, match="runs Python code of its own") as caught:
            load(ModelFiles(section(folder)))
    assert problem(caught).place == "model.name"
    assert "AutoModelForCausalLM" in problem(caught).fact
    assert "model.trust_remote_code" in problem(caught).fix


def test_code_of_others_in_a_tokenizer_is_refused(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    edit(config, auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="Unheard")
    (folder / "evil.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(ModelError, match="custom code"):
        _ = ModelFiles(section(folder)).tokenizer


def test_weights_that_are_pickled_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="can't be loaded") as caught:
        load_base(ModelFiles(section(folder)), "fp32")
    assert "safetensors" in problem(caught).fix


@pytest.mark.parametrize("size", [0, 50, 10_000])
def test_weights_that_are_damaged_are_refused(folder: Path, size: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ModelError, match="can't be loaded"):
        load_base(ModelFiles(section(folder)), "fp32")


def test_weights_of_another_size_are_refused(folder: Path) -> None:
    edit(folder / "config.json", hidden_size=128)
    with pytest.raises(ModelError, match="can't be loaded"):
        load_base(ModelFiles(section(folder)), "fp32")


def test_a_config_that_is_damaged_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be loaded"):
        _ = ModelFiles(section(folder)).config


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer: no tokenizer\.json"):
        _ = ModelFiles(section(folder)).tokenizer


def test_a_reason_of_several_lines_is_not_cut_off() -> None:
    text = "None of these could be read:\n(1) a tokenizer.json,\n(2) a slow one"
    with pytest.raises(ModelError) as caught, explaining("model.name", "m", "fix"):
        raise ValueError(text)
    assert problem(caught).fact.endswith("read: (1) a tokenizer.json, (2) a slow one")
    with pytest.raises(ModelError) as caught, explaining("model.name", "m", "fix"):
        raise ValueError("\nIt failed\nand a page of advice")
    assert problem(caught).fact == "'m' can't be loaded: It failed"


# Where answers end -------------------------------------------------------------------------------


def test_stop_tokens_are_those_of_the_tokenizer_and_of_the_generation_config(folder: Path) -> None:
    assert ModelFiles(section(folder)).stop_ids == {tiny.END}
    edit(folder / "generation_config.json", eos_token_id=[257, 10])
    assert ModelFiles(section(folder)).stop_ids == {tiny.END, 257, 10}
    edit(folder / "generation_config.json", eos_token_id=257)
    assert ModelFiles(section(folder)).stop_ids == {tiny.END, 257}
    (folder / "generation_config.json").unlink()
    assert ModelFiles(section(folder)).stop_ids == {tiny.END}
    files = ModelFiles(section(folder))
    files.tokenizer.eos_token = None
    assert files.stop_ids == frozenset()


@pytest.mark.parametrize("file", [{}, {"do_sample": True}])
def test_sampling_that_the_makers_ask_for_is_kept(
    folder: Path, tmp_path: Path, file: dict[str, Any]
) -> None:
    """In a result and in a merged folder, as in the model itself."""
    edit(folder / "generation_config.json", temperature=0.6, top_k=20, **file)
    model = load_model(section(folder), NoAdapter(), TrainSection(precision="fp32"), device="cpu")
    model.generation_config.save_pretrained(tmp_path)
    for place in (folder, tmp_path):
        found = sampling_defaults(GenerationConfig.from_pretrained(place))
        assert (found.temperature, found.top_k) == (0.6, 20)


def test_sampling_beside_do_sample_false_is_not_taken_and_can_be_written(
    folder: Path, tmp_path: Path
) -> None:
    edit(folder / "generation_config.json", temperature=0.6, top_k=20, do_sample=False)
    assert not sampling_defaults(ModelFiles(section(folder)).generation_config).taken
    model = load_model(section(folder), NoAdapter(), TrainSection(precision="fp32"), device="cpu")
    model.generation_config.save_pretrained(tmp_path)  # transformers would refuse leftovers
    said = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert not {"temperature", "top_k"} & {name for name in said if said[name] is not None}


def test_the_job_may_name_the_stop_tokens() -> None:
    named = ModelSection(name="tiny", stop_tokens=("<|endoftext|>",))
    assert ModelFiles(named).stop_ids == {257}
    unknown = ModelSection(name="tiny", stop_tokens=("<|im_end|>", "</s>"))
    with pytest.raises(ModelError) as caught:
        _ = ModelFiles(unknown).stop_ids
    assert problem(caught).place == "model.stop_tokens"
    assert problem(caught).fact == "'</s>' is not a single token of this tokenizer"
    assert "<|im_end|>" in problem(caught).fix


# Whether model and data fit ----------------------------------------------------------------------


def test_rows_longer_than_the_model_are_refused() -> None:
    files = ModelFiles(TINY)
    check_fits_data(files, tiny.POSITIONS)
    with pytest.raises(ModelError) as caught:
        check_fits_data(files, tiny.POSITIONS + 1)
    assert problem(caught).place == "data.sequence_length"
    assert problem(caught).fact == "4097 tokens a row, but the model has positions for 4096"


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=200, max_position_embeddings=64)
    with pytest.raises(ModelError) as caught:
        check_fits_data(ModelFiles(section(folder)), 128)
    assert [each.place for each in caught.value.problems] == ["data.sequence_length", "model.name"]
    assert caught.value.problems[1].fact == "the tokenizer has 260 tokens, the model embeds 200"


@pytest.mark.parametrize(
    "text",
    ["[]", "null", '{"model_type": ["llama"]}', '{"model_type": "llama", "hidden_size": "x"}'],
)
def test_an_odd_config_is_a_sentence(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match="can't be loaded"):
        _ = ModelFiles(section(folder)).config


@pytest.mark.parametrize("text", ["[]", "{}", '{"model": 3}', "\0", '{"version": "1.0"'])
def test_a_broken_tokenizer_is_a_sentence(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match="can't be loaded"):
        _ = ModelFiles(section(folder)).tokenizer
