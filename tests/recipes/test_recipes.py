"""Every recipe runs, on the tiny model and for a few steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shardtune.cli import main

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where a person runs it: paths in a job are relative to that
    few = ["model.name=tiny", "train.steps=2", "train.warmup_steps=0", "evaluate.every=0"]
    few += ["evaluate.max_new_tokens=4", "save.every=0", f"save.directory={tmp_path / 'run'}"]
    assert main(["train", str(recipe), *few]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["finished"]
    assert report["training"]["step"] == 2
    assert math.isfinite(report["evaluation"]["code"]["after"]["loss"])
    assert list((tmp_path / "run" / "result").glob("*.safetensors"))
