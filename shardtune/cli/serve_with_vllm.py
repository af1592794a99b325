"""`serve --engine vllm`: the command line of vLLM's server for runs and models."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardtune.cli.model_source import (
    ModelSource,
    read_source,
    require_own_names,
    tokenizer_and_stops,
)
from shardtune.errors import LaunchError, Problem, RunError

if TYPE_CHECKING:
    from shardtune.core.setup import Precision
    from shardtune.export.source import ExportSource

EXECUTABLE = "vllm"
_PLACE = "--engine vllm"
_OURS = "--engine transformers"
_DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp16": "half", "fp32": "float32"}


def vllm_words(arguments: argparse.Namespace) -> list[str] | None:
    """The command line, but for the address; None where our own engine is to serve. vLLM's server
    lacks our checks of Host and Origin, our limits and the page, so nobody gets it unasked: `auto`
    only says that it is there."""
    if arguments.engine == "transformers":
        return None
    found = shutil.which(EXECUTABLE)
    if arguments.engine == "auto":
        if found is not None:
            print(f"vLLM is installed: {_PLACE} serves with it, by its own rules and limits")
        return None
    if found is None:
        fact = f"there is no {EXECUTABLE} on the PATH"
        raise LaunchError(Problem(_PLACE, fact, f"pip install vllm, or use {_OURS}"))
    return [found, *_words(arguments)]


def _words(arguments: argparse.Namespace) -> list[str]:
    """What vLLM is told about the models."""
    sources = [read_source(each) for each in arguments.sources]
    require_own_names(sources)
    if arguments.generation_config == "none" and any(each.job for each in sources):
        raise _refuse("vLLM reads the stop tokens of a run in its generation_config.json")
    if len({(each.section.name, each.section.revision) for each in sources}) > 1:
        raise _refuse(f"vLLM serves one model and its adapters; these are {len(sources)} models")
    adapters = [each for each in sources if each.adapter is not None]
    words = ["serve", *_base(sources), *_loading(arguments, sources[0])]
    words += ["--max-num-seqs", str(arguments.max_batch)]
    words += ["--allowed-origins", "[]"]  # else pages of any site may read the answers (CORS)
    if arguments.generation_config == "none":
        words += ["--generation-config", "vllm"]
    return words + (_adapters(adapters) if adapters else _tools(sources[0]))


def _base(sources: Sequence[ModelSource]) -> list[str]:
    from shardtune.models.catalogue import public_name
    from shardtune.models.model_files import ModelFiles

    section = sources[0].section
    files = ModelFiles(section)
    if files.kind != "decoder":
        raise _refuse(f"{section.name} has an encoder")
    names = [each.name for each in sources if each.adapter is None] or [public_name(section.name)]
    words = [files.path, "--served-model-name", *names]
    return words + (["--revision", section.revision] if section.revision else [])


def _loading(arguments: argparse.Namespace, source: ModelSource) -> list[str]:
    if arguments.load == "8bit":
        raise _refuse("vLLM has no 8-bit weights of bitsandbytes")
    words = []
    if arguments.load == "4bit" or source.section.quantization == "nf4":
        words += ["--quantization", "bitsandbytes"]
    if arguments.dtype:
        words += ["--dtype", _DTYPES[arguments.dtype]]
    return words


def _tools(source: ModelSource) -> list[str]:
    from shardtune.export.vllm_export import tool_call_words
    from shardtune.models.model_files import ModelFiles

    tokenizer, _ = tokenizer_and_stops(source, ModelFiles(source.section))
    return tool_call_words(tokenizer)


def _adapters(adapters: Sequence[ModelSource]) -> list[str]:
    """LoRA modules, with the one chat template and the one set of stop tokens that vLLM has."""
    from shardtune.data.formats import learnt_plain
    from shardtune.export.source import ExportSource
    from shardtune.export.vllm_export import (
        adapts_experts,
        lora_rank_words,
        require_servable,
        tool_call_words,
    )

    sources: list[ExportSource] = []
    for each in adapters:
        assert each.run is not None
        assert each.job is not None
        source = ExportSource(each.run, each.job, ())
        if learnt_plain(each.job.data, source.tokenizer):
            raise _refuse(f"{each.name} learnt plain headings, which vLLM's chats don't write")
        if adapts_experts(source):
            fact = f"{each.name} adapts experts, in peft's layout; vLLM has its own"
            run = shlex.quote(str(source.run.path))
            fix = f"shardtune export {run} --to vllm writes it; start what it prints"
            raise RunError(Problem(_PLACE, fact, fix))
        _ = source.parity  # refuses a template or stop tokens other than those of training
        sources.append(source)
    if len({(each.stops, each.tokenizer.chat_template) for each in sources}) > 1:
        raise _refuse("these runs have different chat templates or stop tokens")
    words = ["--enable-lora", *lora_rank_words(max(require_servable(each) for each in sources))]
    words += ["--max-loras", str(len(sources)), "--lora-modules"]
    words += [f"{each.name}={each.adapter}" for each in adapters]
    folder = sources[0].run.result
    if (folder / "chat_template.jinja").is_file():
        words += ["--chat-template", str(folder / "chat_template.jinja")]
    words += tool_call_words(sources[0].tokenizer)
    return [*words, "--generation-config", str(folder)]  # the stop tokens


def _refuse(fact: str) -> RunError:
    return RunError(Problem(_PLACE, fact, f"use {_OURS}"))
