"""Every recipe runs, on the tiny model and for a few steps."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardtune.cli.main import main
from shardtune.models.catalogue import resolve
from tests.models import encoder_decoder
from tests.models.families import write

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


FILES = sorted((ROOT / "recipes" / "deepspeed").glob("*.json"))
FEW = [
    "model.name=tiny", "train.steps=2", "train.warmup_steps=0", "evaluate.every=0",
    "evaluate.max_new_tokens=4", "save.every=0",
]  # fmt: skip
TINY = {
    "tensor_lora": ["strategy.degree=2", "launch.processes=2"],
    "fsdp_tensor": ["strategy.tensor=2", "launch.processes=4"],
    "gpu_fp8_8b": ["data.sequence_length=256"],
    "tinyllama_ddp": ["data.sequence_length=256"],
    "codellama_fsdp": ["data.sequence_length=256", "train.global_batch=8", "launch.processes=2"],
    "zero3_lora_checkpointing": ["data.sequence_length=256"],
    "falcon_qlora": ["data.sequence_length=256"],
}
"""The tiny model has two key-value heads, not three; and long rows are slow on a CPU."""
FAMILIES = {"falcon_qlora": "falcon"}
"""Of recipes for models that aren't built as Llama is, which the tiny model is."""
LONG = {
    *("zeropp_2nodes", "fsdp_hybrid", "fsdp_tensor", "fsdp_pipeline", "zero3_long", "zero2"),
    *("ia3", "tensor_lora"),
    *("zero3_offload_cpu", "zero1", "zero2_qlora"),  # which the conformance table has, too
    *("layers", "pipeline_1f1b", "zero3_full", "fsdp_qlora", "ddp_lora", "gpu_fp8_8b"),
    *("falcon_qlora", "flan_t5_zero3"),  # families and encoders have tests of their own
    *("tinyllama_ddp", "codellama_fsdp", "fsdp_full", "zero3_lora_checkpointing"),
    *("gpu_lora_8b", "gpu_lean_8b", "gpu_paged_1b", "gpu_qlora_70b"),  # plain ones on a CPU
}
"""Four ranks, or cut as another that is here: `tests/conformance` has a row of each."""


def marked(paths: list[Path]) -> list[Any]:
    return [
        pytest.param(path, id=path.stem, marks=pytest.mark.long if path.stem in LONG else ())
        for path in paths
    ]


def run(recipe: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """Trains a recipe, shortened, and returns its report."""
    directory = folder / "run"
    command = ["train", str(recipe), *FEW, f"save.directory={directory}", *overrides]
    assert main(command) == 0
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    assert report["finished"]
    assert report["training"]["step"] == 2
    (evaluated,) = report["evaluation"].values()
    assert math.isfinite(evaluated["after"]["loss"])
    assert list((directory / "result").glob("*.safetensors"))
    return report


def tiny(family: str, folder: Path) -> str:
    """The override that names a tiny model of another family, with the tiny model's tokenizer."""
    files = Path(resolve("tiny"))
    tokens = json.loads((files / "config.json").read_text())
    kept = {key: tokens[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    write(folder, family, **kept)
    for file in files.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return f"model.name={folder}"


def pairs(recipe: Path, folder: Path) -> list[str]:
    """Of a recipe for a model with an encoder: such a model, and pairs that need no hub."""
    if "format: source_target" not in recipe.read_text():
        return []
    encoder_decoder.write(folder / "model", "flan_t5")
    for name, numbers in (("train", range(16)), ("eval", range(90, 93))):
        rows = [{"dialogue": f"A: {n}? B: No, {n + 1}.", "summary": str(n + 1)} for n in numbers]
        text = "\n".join(map(json.dumps, rows))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return [
        f"model.name={folder / 'model'}", "train.epochs=null", "launch.processes=2",
        "train.global_batch=4", f"data.train.0.path={folder / 'train.jsonl'}",
        f"data.eval.0.path={folder / 'eval.jsonl'}", "data.eval.0.split=train",
    ]  # fmt: skip


def require(text: str) -> None:
    for word, package in (("deepspeed", "deepspeed"), ("nf4", "bitsandbytes")):
        if word in text and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if "type: ray" in text:
        pytest.skip("Ray is started in a process of its own: tests/launch/test_ray.py has the case")
    if "nvme" in text and not Path("/usr/include/libaio.h").exists():
        pytest.skip("libaio is not installed")
    if "nvme" in text:
        pytest.skip(
            "DeepSpeed compiles for minutes; tests/parallel/test_deepspeed_engine.py has the case"
        )


MEANT_FOR = {
    "gpu_lora_8b": "1xH200",
    "gpu_fp8_8b": "1xH200",
    "gpu_lean_8b": "1xH200",
    "gpu_paged_1b": "1xH200",
    "gpu_qlora_70b": "1xH200",
    "tinyllama_ddp": "2xA10",
    "codellama_fsdp": "4xA100-80GB",
    "zero3_lora_checkpointing": "2xRTX4090",
    "falcon_qlora": "1xRTX4090",
}


@pytest.mark.parametrize("name", MEANT_FOR)
def test_a_recipe_fits_what_it_is_meant_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / f"{name}.yaml"
    assert main(["estimate", str(recipe), "--cluster", MEANT_FOR[name]]) == 0
    assert capsys.readouterr().out.startswith("fits")


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 12
    assert len(FILES) == 4


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("recipe", marked(RECIPES))
def test_recipe(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(recipe.read_text())
    monkeypatch.chdir(ROOT)  # where a person runs it: paths in a job are relative to that
    changes = TINY.get(recipe.stem, [])
    if family := FAMILIES.get(recipe.stem):
        changes = [*changes, tiny(family, tmp_path / "model")]
    run(recipe, tmp_path, *changes, *pairs(recipe, tmp_path))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("file", marked(FILES))
def test_a_deepspeed_file_runs_as_it_is(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("deepspeed")
    monkeypatch.chdir(ROOT)
    (tmp_path / "job.yaml").write_text(
        (ROOT / "recipes" / "ddp_lora.yaml")
        .read_text()
        .replace("strategy: {type: ddp}", f"strategy: {{type: deepspeed, config: {file}}}")
    )
    run(tmp_path / "job.yaml", tmp_path)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["fsdp_full", "zero3_full"])
@pytest.mark.long
def test_an_adapter_of_a_spread_model_is_read_back_exactly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run reads its result back through plain peft and compares the logits; in fp32 to 1e-4."""
    recipe = ROOT / "recipes" / f"{name}.yaml"
    require(recipe.read_text())
    monkeypatch.chdir(ROOT)
    lora = "adapter={type: lora, rank: 4}"
    report = run(recipe, tmp_path, lora, "train.precision=fp32", "train.learning_rate=0.01")
    assert report["result"]["largest_difference"] < 1e-4
    assert (tmp_path / "run" / "result" / "adapter_model.safetensors").stat().st_size > 10_000
