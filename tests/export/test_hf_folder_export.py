"""Exports as plain transformers reads them, and the command around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from shardtune.cli.main import main
from shardtune.errors import RunError
from shardtune.export import hf_folder_export
from shardtune.export.hf_folder_export import export_hf
from shardtune.export.source import ExportSource
from tests.export.tuned import PROMPTS, finished


def test_a_folder_in_shards(
    source: ExportSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_folder_export, "SHARD_SIZE", "150KB")
    found = export_hf(source, tmp_path / "out", torch.bfloat16)
    assert found.shards > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == source.tokenizer.chat_template
    stops = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert stops == [tokenizer.eos_token_id]
    whole = source.whole_model()
    ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    with torch.no_grad():
        exact, rounded = whole.model(ids).logits, model.float()(ids).logits
    assert (exact - rounded).abs().max() < found.rounded.bound
    card = (tmp_path / "out" / "README.md").read_text()
    assert "merged into" in card
    base = str(source.files.path)
    assert all(base not in path.read_text() for path in (tmp_path / "out").glob("*.json"))


def test_a_result_with_another_template_is_refused(tmp_path: Path) -> None:
    source = finished(tmp_path)
    template = source.run.result / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\\n", "assistant:\\n"))
    with pytest.raises(RunError, match="template parity"):
        export_hf(source, tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


def test_the_command(
    source: ExportSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = str(source.run.path), str(tmp_path / "out")
    assert main(["export", run, "--to", "hf", target, "--dtype", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "20 dialogues have the ids and stop tokens of training" in said
    assert "read back by transformers" in said
    assert json.loads((tmp_path / "out" / "export.json").read_text())["to"] == "hf"
    assert main(["verify", target]) == 0
    weights = tmp_path / "out" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert main(["verify", target]) == 1
    assert main(["export", run, "--to", "hf", target]) == 2
    assert "is an export that was changed since" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_gguf_by_the_command(
    source: ExportSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = str(source.run.path), str(tmp_path / "out")
    assert main(["export", run, target, "--to", "gguf"]) == 0
    said = capsys.readouterr().out
    assert "within what Q8_0 explains" in said
    assert "read by transformers:" in said
    assert main(["export", run, target, "--to", "gguf", "--adapter-only"]) == 0
    assert (tmp_path / "out" / "adapter-F32.gguf").is_file()
    assert main(["export", run, target, "--to", "gguf", "--dtype", "fp32"]) == 2
    assert "--dtype: is an option of hf" in capsys.readouterr().err
