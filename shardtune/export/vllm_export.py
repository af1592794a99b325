"""vLLM: the adapter in the layout that its LoRA loader reads, and the command that serves it."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtune.checkpoint.manifest import MANIFEST_FILE
from shardtune.data.template_parity import folder_reader, require_parity, training_reader
from shardtune.errors import Problem, RunError
from shardtune.export.folder import ExportFacts, export_folder
from shardtune.export.hf_folder_export import export_hf
from shardtune.export.source import ExportSource

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `--max-lora-rank`."""
_WEIGHTS = "adapter_model.safetensors"
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
        export_hf(source, target, source.files.dtype, to="vllm")
        return VllmExport(f"vllm serve {shlex.quote(str(target))}", adapter=False)
    rank = require_servable(source)
    facts = ExportFacts(
        "vllm", "float32", source.base_name, sorted(source.stops), source.parity.compared
    )
    with export_folder(target, facts) as partial:
        for file in sorted(source.run.result.iterdir()):
            if file.name != MANIFEST_FILE:
                shutil.copyfile(file, partial / file.name)
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
    return shlex.join(words)


def lora_rank_words(rank: int) -> list[str]:
    """vLLM's option for adapters of at most this rank."""
    return ["--max-lora-rank", str(next(each for each in RANKS if each >= rank))]


def require_servable(source: ExportSource) -> int:
    """The adapter's largest rank; RunError for what vLLM's loader has no place for."""
    settings = json.loads((source.run.result / "adapter_config.json").read_text(encoding="utf-8"))
    adapter = source.job.adapter
    if adapter.type != "lora":
        raise _refuse(f"vLLM serves LoRA, not {adapter.type}")
    if settings.get("use_dora"):
        raise _refuse("vLLM doesn't serve DoRA")
    if settings.get("modules_to_save") or source.job.model.add_tokens:
        raise _refuse("the adapter brings whole weights (modules_to_save or new tokens)")
    if source.job.model.quantization == "int8":
        raise _refuse("the adapter belongs to int8 weights, which vLLM doesn't make by itself")
    names = _names(source.run.result / _WEIGHTS)
    if experts := [name for name in names if ".experts." in name]:
        raise _refuse(f"{experts[0]} is a stacked adapter of experts, in peft's layout")
    ranks = [settings["r"], *(settings.get("rank_pattern") or {}).values()]
    if max(ranks) > RANKS[-1]:
        raise _refuse(f"the adapter has rank {max(ranks)}, and vLLM takes at most {RANKS[-1]}")
    return int(max(ranks))


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
