"""Model cards: written from the run, and no file of a result names a place of the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.cli.result_command import ask, merge
from shardtune.models import tiny
from shardtune.models.catalogue import public_name
from shardtune.models.hf_folder import write_folder
from shardtune.train import train
from tests.synthetic import make_job


def run_in(folder: Path, adapter: dict[str, Any], model: str) -> Path:
    rows = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(12)]
    for name, some in (("private", rows[:8]), ("held", rows[8:])):
        text = "\n".join(map(json.dumps, some))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    sources = {
        name: [{"format": "instruction", "path": str(folder / f"{name}.jsonl"), "name": name}]
        for name in ("private", "held")
    }
    job = make_job(
        str(folder / "run"),
        model={"name": model},
        data={"train": sources["private"], "eval": sources["held"], "sequence_length": 64},
        train={"steps": 2, "global_batch": 2, "precision": "fp32", "learning_rate": 1e-3},
        adapter=adapter,
    )
    train(job)
    return folder / "run"


def parts(card: str) -> tuple[dict[str, Any], str]:
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def assert_names_no_place(folder: Path, *places: Path) -> None:
    """Every byte of every file is looked at."""
    forbidden = [*map(str, places), os.environ["XDG_CACHE_HOME"], str(Path.home()), str(Path.cwd())]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        for place in forbidden:
            assert place.encode() not in path.read_bytes(), f"{path.name} names {place}"


@pytest.fixture
def local_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "secret-project" / "base-7b"
    folder.mkdir(parents=True)
    write_folder(folder, tiny.config(), tiny.weights(), tiny.tokens())
    return str(folder)


@pytest.mark.slow
def test_the_card_of_an_adapter_and_of_its_merge(tmp_path: Path, local_model: str) -> None:
    run = run_in(tmp_path, {"type": "lora", "rank": 2}, local_model)
    assert_names_no_place(run / "result", tmp_path)
    front, text = parts((run / "result" / "README.md").read_text())
    assert front == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["shardtune", "lora"],
    }, "a folder is no hub id, and its licence isn't known"
    assert "# A lora adapter for base-7b" in text
    report = json.loads((run / "report.json").read_text())
    held = report["evaluation"]["held"]
    assert f"| held | {held['before']['loss']:.4f} | {held['after']['loss']:.4f} |" in text
    assert "| private | train | instruction | 8 |" in text
    digest = json.loads((run / "environment.json").read_text())["data"]["train/private"]
    assert digest[:16] in text
    assert "learning_rate: 0.001" in text
    assert "- torch 2." in text
    saved = json.loads((run / "result" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "base-7b"

    said = ask(run, "Say 3.", max_new_tokens=4, temperature=0.0, raw=True)  # the job knows the base
    assert isinstance(said, str)
    merge(run, tmp_path / "merged")
    assert_names_no_place(tmp_path / "merged", tmp_path)
    front, text = parts((tmp_path / "merged" / "README.md").read_text())
    assert front["library_name"] == "transformers"
    assert "# A lora adapter, merged into base-7b" in text
    assert "PeftModel" not in text


def test_the_card_of_a_full_fine_tune(tmp_path: Path, local_model: str) -> None:
    run = run_in(tmp_path, {"type": "none"}, "tiny")
    assert_names_no_place(run / "result", tmp_path)
    front, text = parts((run / "result" / "README.md").read_text())
    assert front["license"] == "apache-2.0", "a built-in model's is known"
    assert front["library_name"] == "transformers"
    assert front["tags"] == ["shardtune", "full-fine-tune"]
    assert "# A full fine-tune of tiny" in text


def test_what_others_know_a_model_by(tmp_path: Path) -> None:
    assert public_name("tiny") == "tiny"
    assert public_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert public_name(str(tmp_path)) == tmp_path.name
