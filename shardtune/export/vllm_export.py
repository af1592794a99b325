"""vLLM: the adapter in the layout that its LoRA loader reads, and the command that serves it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardtune.core.model.parallel_plan import expert_count
from shardtune.data.template_parity import folder_reader, require_parity, training_reader
from shardtune.errors import Problem, RunError
from shardtune.export.expert_layouts import (
    has_experts,
    peft_deltas,
    require_known,
    require_same_deltas,
    vllm_deltas,
    vllm_settings,
    vllm_tensors,
)
from shardtune.export.folder import ExportFacts, export_folder
from shardtune.export.hf_folder_export import export_hf
from shardtune.export.source import ExportSource
from shardtune.serve.served_model import call_spelling, template_renderer

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `--max-lora-rank`."""
_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_MERGED = "export the merged model: --to hf, then `vllm serve DIR`"


@dataclass(frozen=True)
class VllmExport:
    """A folder for vLLM."""

    command: str
    adapter: bool
    """Whether it is an adapter for its base model, or a whole model."""


def export_vllm(source: ExportSource, target: Path) -> VllmExport:
    """Writes the adapter, or the whole model of a full fine-tune; refuses what vLLM can't load."""
    source.require_decoder("vllm")
    if not source.adapted:
        export_hf(source, target, source.dtype, to="vllm")
        words = ["vllm", "serve", str(target), *tool_call_words(source.tokenizer)]
        return VllmExport(shlex.join(words), adapter=False)
    rank = require_servable(source)
    facts = ExportFacts(
        "vllm", "float32", source.base_name, sorted(source.stops), source.parity.compared
    )
    with export_folder(target, facts) as partial:
        source.copy_result(partial)
        if adapts_experts(source):
            _write_experts(source, partial)
        else:
            _compare_weights(source.run.result / _WEIGHTS, partial / _WEIGHTS)
        trained = training_reader(source.files.tokenizer, source.files.stop_ids)
        require_parity(trained, [folder_reader(partial)], source.files.tokenizer)
    return VllmExport(serve_command(source, target, rank), adapter=True)


def serve_command(source: ExportSource, target: Path, rank: int) -> str:
    """What starts vLLM's server with the adapter, its template and its stop tokens."""
    name = source.run.path.resolve().name
    words = ["vllm", "serve", source.files.path]
    if source.job.model.revision:
        words += ["--revision", source.job.model.revision]
    words += ["--enable-lora", *lora_rank_words(rank)]
    words += ["--lora-modules", f"{name}={target}"]
    if (source.run.result / "chat_template.jinja").is_file():
        words += ["--chat-template", str(target / "chat_template.jinja")]
    words += ["--generation-config", str(target)]  # the stop tokens
    if source.job.model.quantization == "nf4":
        words += ["--quantization", "bitsandbytes"]
    words += tool_call_words(source.tokenizer)
    return shlex.join(words)


def lora_rank_words(rank: int) -> list[str]:
    """vLLM's option for adapters of at most this rank."""
    return ["--max-lora-rank", str(next(each for each in RANKS if each >= rank))]


def tool_call_words(tokenizer: Any) -> list[str]:
    """vLLM's options for calls of functions, in the spelling of the chat template; without them it
    refuses requests with tools."""
    spelling = call_spelling(tokenizer, template_renderer(tokenizer))
    return ["--enable-auto-tool-choice", "--tool-call-parser", spelling.parser] if spelling else []


def require_servable(source: ExportSource) -> int:
    """The adapter's largest rank; RunError for what vLLM's loader has no place for."""
    settings = json.loads((source.run.result / _SETTINGS).read_text(encoding="utf-8"))
    adapter = source.job.adapter
    if adapter.type != "lora":
        raise _refuse(f"vLLM serves LoRA, not {adapter.type}")
    if settings.get("use_dora"):
        raise _refuse("vLLM doesn't serve DoRA")
    if settings.get("modules_to_save") or source.job.model.add_tokens:
        raise _refuse("the adapter brings whole weights (modules_to_save or new tokens)")
    if source.job.model.quantization == "int8":
        raise _refuse("the adapter belongs to int8 weights, which vLLM doesn't make by itself")
    if adapts_experts(source):
        require_known(source.files.config.model_type, settings)
    ranks = [settings["r"], *(settings.get("rank_pattern") or {}).values()]
    if max(ranks) > RANKS[-1]:
        raise _refuse(f"the adapter has rank {max(ranks)}, and vLLM takes at most {RANKS[-1]}")
    return int(max(ranks))


def adapts_experts(source: ExportSource) -> bool:
    """Whether the adapter has routed experts, which vLLM reads in its own layout only."""
    return has_experts(_names(source.run.result / _WEIGHTS))


def _write_experts(source: ExportSource, folder: Path) -> None:
    """Replaces the adapter's files by those in vLLM's layout, and reads both back."""
    from safetensors.torch import load_file, save_file

    family = source.files.config.model_type
    experts = expert_count(source.files.config)
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    trained = load_file(source.run.result / _WEIGHTS)
    save_file(vllm_tensors(trained, settings, experts, family), folder / _WEIGHTS, {"format": "pt"})
    for_vllm = vllm_settings(settings, family)
    (folder / _SETTINGS).write_text(json.dumps(for_vllm, indent=2) + "\n", encoding="utf-8")
    written = load_file(folder / _WEIGHTS)
    read_back = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    require_same_deltas(
        peft_deltas(trained, settings, experts, family),
        vllm_deltas(written, read_back, experts, family),
    )
    if any(
        not torch.equal(tensor, written[name])
        for name, tensor in trained.items()
        if ".experts." not in name
    ):
        raise _refuse("read back, the weights differ from the run's")


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def _compare_weights(one: Path, other: Path) -> None:
    from safetensors.torch import load_file

    ours, theirs = load_file(one), load_file(other)
    if ours.keys() != theirs.keys() or any(
        not torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    ):
        raise _refuse("read back, the weights differ from the run's")


def _refuse(fact: str) -> RunError:
    return RunError(Problem("--to vllm", fact, _MERGED))
