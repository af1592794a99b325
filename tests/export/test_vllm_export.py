"""Folders for vLLM: what its loader reads, the command, and what it can't serve."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shardtune.config.job import LoRA, NoAdapter
from shardtune.errors import RunError
from shardtune.export.source import ExportSource
from shardtune.export.vllm_export import export_vllm
from tests.export.tuned import finished


def test_the_adapter_and_its_command(source: ExportSource, tmp_path: Path) -> None:
    target = tmp_path / "out"
    found = export_vllm(source, target)
    words = shlex.split(found.command)
    assert words[:3] == ["vllm", "serve", source.files.path]
    assert words[words.index("--max-lora-rank") + 1] == "8"
    assert words[words.index("--lora-modules") + 1] == f"run={target}"
    assert Path(words[words.index("--chat-template") + 1]).is_file()
    stops = Path(words[words.index("--generation-config") + 1]) / "generation_config.json"
    assert json.loads(stops.read_text())["eos_token_id"] == [2]
    weights = load_file(target / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in weights)


@pytest.mark.parametrize("adapter", [LoRA(rank=4), NoAdapter()])
def test_the_command_has_the_parser_of_the_template_s_calls(
    adapter: LoRA | NoAdapter, tmp_path: Path
) -> None:
    source = finished(tmp_path, adapter=adapter)
    told = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    assert "<tool_call>" in source.tokenizer.chat_template
    assert shlex.join(told) in export_vllm(source, tmp_path / "out").command


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (LoRA(rank=4, variant="dora"), "DoRA"),
        (LoRA(rank=4, modules_to_save=("lm_head",)), "whole weights"),
    ],
)
def test_what_vllm_cant_serve_is_refused(adapter: LoRA, told: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=told):
        export_vllm(finished(tmp_path, "llama", adapter), tmp_path / "out")
    assert not (tmp_path / "out").exists()
