"""What a merged model says: the adapter's own words, in plain transformers and peft, by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.cli.main import main
from shardtune.models import tiny
from shardtune.models.hf_folder import write_folder
from shardtune.train import train
from tests.synthetic import make_job

HELD_OUT = range(100, 108)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model whose files are in bf16, as the quickstart's are, and data for it."""
    folder = tmp_path_factory.mktemp("answers")
    config = tiny.config()
    config.dtype = torch.bfloat16
    (folder / "base").mkdir()
    weights = {name: tensor.bfloat16() for name, tensor in tiny.weights().items()}
    write_folder(folder / "base", config, weights, tiny.tokens())
    rows = [{"instruction": f"Say {n}.", "output": f"It is {n}, not {n + 1}."} for n in range(20)]
    (folder / "d.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def trained(folder: Path, precision: str, adapter: str = "lora") -> Path:
    """A real run; made once."""
    run = folder / f"{precision}-{adapter}"
    if not run.exists():
        source = {"format": "instruction", "path": str(folder / "d.jsonl"), "name": "d"}
        job = make_job(
            str(run),
            model={"name": str(folder / "base")},
            data={"train": [source], "sequence_length": 64},
            train={
                "steps": 6, "global_batch": 4, "precision": precision, "learning_rate": 5e-3
            },
            adapter={"type": "lora", "rank": 4} if adapter == "lora" else {"type": "none"},
        )  # fmt: skip
        train(job)
    return run


@torch.no_grad()
def greedy(model: Any, tokenizer: Any) -> list[list[int]]:
    """Answers to held-out prompts, none of which ends early."""
    asked = [[{"role": "user", "content": f"Say {n}."}] for n in HELD_OUT]
    prompts = [
        tokenizer.apply_chat_template(
            each, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        for each in asked
    ]
    length: dict[str, Any] = {"max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False}
    return [model.eval().generate(**each, **length)[0].tolist() for each in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["merge"], ["export", "--to", "hf"]], ids=["merge", "export"])
def test_a_default_merge_gives_the_adapters_answers(
    command: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run in fp32 on a base in bf16. Rounded to bf16 the answers are others."""
    run = trained(folder, "fp32")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "result")
    expected = greedy(PeftModel.from_pretrained(base, run / "result"), tokenizer)

    assert main([*command, str(run), str(tmp_path / "merged")]) == 0
    said = capsys.readouterr().out
    assert "in float32, in which the run computed and was evaluated (--dtype bf16: half" in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    assert greedy(merged, AutoTokenizer.from_pretrained(tmp_path / "merged")) == expected

    assert main([*command, str(run), str(tmp_path / "small"), "--dtype", "bf16"]) == 0
    cost = said.partition("logits move by up to ")[2].partition(")")[0]
    assert f"rounded to bfloat16: logits within {cost} " in capsys.readouterr().out.replace(
        "bfloat16: within", "bfloat16: logits within"
    ), "the cost that was named is the one that is paid"
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    assert greedy(small, tokenizer) != expected, "or this test couldn't see rounding"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("command", [["merge"], ["export", "--to", "hf"]], ids=["merge", "export"])
def test_a_run_in_16_bits_is_merged_in_16_bits(
    command: list[str],
    precision: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In what it computed in, but fp16, whose range weights may exceed."""
    run = trained(folder, precision)
    assert main([*command, str(run), str(tmp_path / "merged")]) == 0
    reason = {"bf16": "in which the run computed", "fp16": "the base model's own"}[precision]
    assert f"in bfloat16, {reason}" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("to", ["hf", "vllm"])
def test_the_export_of_a_full_fine_tune_has_the_weights_of_its_result(
    to: str, precision: str, folder: Path, tmp_path: Path
) -> None:
    run = trained(folder, precision, "none")
    assert main(["export", str(run), str(tmp_path / "out"), "--to", to]) == 0
    one, other = (
        load_file(each / "model.safetensors") for each in (run / "result", tmp_path / "out")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert {tensor.dtype for tensor in other.values()} == {dtype}
