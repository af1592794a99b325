"""Runs with new tokens, on real ranks: trained, saved, and read back by others' tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.cli.main import main
from shardtune.models.catalogue import resolve

pytestmark = [pytest.mark.slow, pytest.mark.process]

JOB = """\
model: {name: tiny, add_tokens: ["<|q|>", "<|a|>", "<|end|>"]}
adapter: {type: lora, rank: 4, modules_to_save: [embed_tokens, lm_head]}
data:
  train: [{path: tales.jsonl, format: completion}]
  sequence_length: 48
train: {steps: 4, global_batch: 4, learning_rate: 1e-2, precision: fp32}
evaluate: {samples: 0}
launch: {processes: 2, threads: 1}
"""
RUNS = {
    "ddp-lora-bf16": ("strategy.type=ddp", "train.precision=bf16"),
    "fsdp-lora": ("strategy.type=fsdp",),
    "zero3-lora": ("strategy.type=deepspeed", "strategy.zero_optimization.stage=3"),
    "zero3-qlora": (
        "strategy.type=deepspeed",
        "strategy.zero_optimization.stage=3",
        "model.quantization=nf4",
    ),
}
LONG = {"ddp-lora-bf16", "zero3-lora", "zero3-qlora"}
"""16 bits are slow on some CPUs."""
FULL = ("strategy.type=fsdp", "adapter={type: none}")
TEXT = "<|q|>7<|a|>seven<|end|>"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"<|q|>{n}<|a|>{n + 1}<|end|>"} for n in range(40)]
    Path("tales.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("job.yaml").write_text(JOB)
    return tmp_path


@torch.no_grad()
def logits(model: torch.nn.Module, folder: str) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert ids.max() == 262
    return model.eval()(input_ids=ids).logits


def plain_model() -> torch.nn.Module:
    """What anybody does before an adapter with new tokens is loaded."""
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny"))
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained("run/result")))
    return model


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in RUNS],
)
def test_an_adapter_brings_its_tokens(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "zero3" in name:
        pytest.importorskip("deepspeed", reason="needs the extra `deepspeed`")
    if "qlora" in name:
        pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    assert main(["train", "job.yaml", "save.directory=run", *RUNS[name]]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 new; the embedding grows from 260 to 263 rows" in said
    model = PeftModel.from_pretrained(plain_model(), "run/result")
    found = logits(model, "run/result")
    rows = model.get_input_embeddings().weight[260:]
    assert not torch.equal(rows[0], rows[1]), "they start alike, and each learns its own"
    assert main(["merge", "run", "merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert merged.config.vocab_size == 263
    assert (logits(merged, "merged") - found).abs().max() < 1e-4
    assert main(["generate", "run", "--prompt", "<|q|>7<|a|>", "--raw", "--max-new-tokens=4"]) == 0


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_a_whole_model_has_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.yaml", "save.directory=run", *FULL]) == 0
    model = AutoModelForCausalLM.from_pretrained("run/result")
    assert model.config.vocab_size == 263
    report = json.loads(Path("run/report.json").read_text())
    assert report["result"]["largest_difference"] < 1e-4  # to the trained model's logits
    rows = model.get_input_embeddings().weight[260:]
    assert not torch.equal(rows[0], rows[1])
    assert logits(model, "run/result").shape[-1] == 263
    assert main(["generate", "run", "--prompt", "<|q|>7<|a|>", "--raw", "--max-new-tokens=4"]) == 0
