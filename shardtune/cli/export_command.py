"""`shardtune export`: a run's model in the form that another tool reads, read back and compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.arguments import Commands, add_command, add_run_directory
from shardtune.cli.result_command import comparison_prompts, open_result
from shardtune.cli.say_dtype import say_dtype
from shardtune.errors import Problem, RunError

if TYPE_CHECKING:
    from shardtune.checkpoint.merge import LogitDifference
    from shardtune.data.template_parity import TemplateParity
    from shardtune.export.gguf_export import GgufExport
    from shardtune.export.source import ExportSource

_DTYPES = ("bf16", "fp16", "fp32")
_GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "export",
        _export,
        "export a run's model for another tool, and verify it",
        """\
  shardtune export runs/quickstart --to hf out/hf
  shardtune export runs/qlora --to hf out/qlora --as-stored
  shardtune export runs/quickstart --to gguf out/gguf --type q8_0
  shardtune export runs/quickstart --to gguf out/adapter --adapter-only
  shardtune export runs/quickstart --to ollama out/ollama""",
    )
    add_run_directory(command)
    command.add_argument("target", type=Path, metavar="DIR", help="folder to write")
    command.add_argument("--to", required=True, choices=tuple(_TARGETS), help="the target format")
    command.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="hf: dtype of the weights (the run's compute dtype)",
    )
    command.add_argument(
        "--as-stored",
        action="store_true",
        help="hf: an nf4 or int8 run unmerged, its quantized model and adapter in one folder; "
        "otherwise weights are dequantized and the adapter is merged",
    )
    command.add_argument(
        "--type", choices=_GGUF_TYPES, help="gguf, ollama: type of the weights (q8_0)"
    )
    command.add_argument(
        "--adapter-only", action="store_true", help="gguf: the LoRA adapter, for its base model"
    )


def _export(arguments: argparse.Namespace) -> int:
    from shardtune.export.source import ExportSource

    _require_meant(arguments)
    run, job = open_result(arguments.directory)
    source = ExportSource(run, job, comparison_prompts(run))
    _TARGETS[arguments.to](source, arguments)
    return 0


def _hf(source: ExportSource, arguments: argparse.Namespace) -> None:
    from shardtune.export.hf_folder_export import export_hf
    from shardtune.models.load import COMPUTE_DTYPES

    if arguments.as_stored:
        _hf_as_stored(source, arguments)
        return
    dtype = COMPUTE_DTYPES[arguments.dtype] if arguments.dtype else source.dtype
    found = export_hf(source, arguments.target, dtype)
    written = say_dtype(
        arguments.target,
        found.dtype,
        asked=arguments.dtype is not None,
        computed=source.job.train.compute_precision,
        in_bf16=found.in_bf16,
        whole=not source.adapted,
    )
    print(f"{written}\n{_count(found.shards, 'file')} of weights")
    _print_merge(found.merged)
    _print_difference(f"rounded to {found.dtype}", found.rounded)
    print("read back by transformers: every weight as it was written")
    _print_parity(source.parity)


def _hf_as_stored(source: ExportSource, arguments: argparse.Namespace) -> None:
    from shardtune.export.hf_stored_export import export_stored

    if arguments.dtype:
        fact = f"--as-stored writes weights as the run has them, not in {arguments.dtype}"
        raise RunError(Problem("--dtype", fact, "leave out one of the two"))
    found = export_stored(source, arguments.target)
    kind, back = found.quantization, found.read_back
    size = f"{found.bytes / 2**20:.0f} MiB"
    print(f"wrote {arguments.target}: the model in {kind}, {size}, and the adapter beside it")
    layers = f"{_count(found.layers, 'layer')} in {kind}"
    print(
        f"read back by transformers: {layers}, other weights and the adapter as written, bit by bit"
    )
    _print_difference("answers as the run does", back.logits)
    print(f"{back.next_tokens:.1%} of next tokens are the same")
    _print_parity(source.parity)


def _gguf(source: ExportSource, arguments: argparse.Namespace) -> None:
    from shardtune.export.gguf_adapter import export_gguf_adapter
    from shardtune.export.gguf_export import export_gguf

    if arguments.adapter_only:
        adapter = export_gguf_adapter(source, arguments.target)
        print(f"wrote {arguments.target / adapter.file}: {_count(adapter.modules, 'module')}")
        print(f"read back: every product of A and B is the adapter's, within {adapter.error:.2g}")
        print(f"use it: llama-cli -m BASE.gguf --lora {arguments.target / adapter.file}")
        return
    found = export_gguf(source, arguments.target, arguments.type or "q8_0")
    _print_gguf(found, arguments.target)
    _print_parity(source.parity)


def _vllm(source: ExportSource, arguments: argparse.Namespace) -> None:
    from shardtune.export.vllm_export import export_vllm

    found = export_vllm(source, arguments.target)
    what = "the adapter" if found.adapter else "the whole model"
    print(f"wrote {arguments.target}: {what}, read back as it was written")
    _print_parity(source.parity)
    print(f"serve it: {found.command}")


def _ollama(source: ExportSource, arguments: argparse.Namespace) -> None:
    from shardtune.export.ollama_export import export_ollama

    found = export_ollama(source, arguments.target, arguments.type or "q8_0")
    _print_gguf(found.gguf, arguments.target)
    template = found.template
    trimmed = f", {len(template.blanks)} but for blanks at edges" if template.blanks else ""
    compared = _count(template.compared, "dialogue")
    print(f"Go template: {template.name}, {compared} as the chat template writes them{trimmed}")
    _print_parity(source.parity)
    print(f"use it: ollama create NAME -f {arguments.target / 'Modelfile'}")


def _print_gguf(found: GgufExport, target: Path) -> None:
    back = found.read_back
    print(f"wrote {target / found.file}: {back.bytes / 2**20:.0f} MiB")
    _print_merge(found.merged)
    print(
        f"read back: {back.tensors} tensors within what {found.kind.upper()} explains "
        f"(at most {back.largest_error:.2%} of a tensor's largest), {back.keys} keys equal"
    )
    if found.transformers is None:
        print("read by transformers: it can't read this family from GGUF")
    else:
        _print_reader("transformers", found.transformers.logits, found.transformers.next_tokens)
    if found.llama_cpp is None:
        print("read by llama.cpp: not installed here (pip install 'shardtune[gguf]')")
    else:
        _print_reader("llama.cpp", found.llama_cpp.logits, found.llama_cpp.next_tokens)
        if found.llama_cpp.splits_accents:
            print(
                "llama.cpp doesn't compose accents (NFC), as this tokenizer does: a letter and an "
                "accent that come as two characters are other tokens there"
            )


def _print_reader(name: str, logits: float, next_tokens: float) -> None:
    print(f"read by {name}: {next_tokens:.1%} of next tokens are the same, logits in {logits:.2g}")


def _print_merge(merged: LogitDifference | None) -> None:
    if merged is not None:
        _print_difference("merged", merged)


def _print_difference(what: str, found: LogitDifference) -> None:
    print(f"{what}: logits within {found.found:.2g} (rounding explains up to {found.bound:.2g})")


def _print_parity(parity: TemplateParity) -> None:
    left = f", {len(parity.untrainable)} can't be trained on" if parity.untrainable else ""
    print(
        f"template: {_count(parity.compared, 'dialogue')} have the ids and stop tokens of training"
        f"{left}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


_TARGETS: Mapping[str, Callable[[ExportSource, argparse.Namespace], None]] = {
    "hf": _hf,
    "gguf": _gguf,
    "vllm": _vllm,
    "ollama": _ollama,
}
_MEANT_FOR = {
    "dtype": ("hf",),
    "as_stored": ("hf",),
    "type": ("gguf", "ollama"),
    "adapter_only": ("gguf",),
}


def _require_meant(arguments: argparse.Namespace) -> None:
    """Refuses an option that the target doesn't have: it would be ignored in silence."""
    for option, targets in _MEANT_FOR.items():
        if getattr(arguments, option) and arguments.to not in targets:
            flag = f"--{option.replace('_', '-')}"
            fact = f"is an option of {' and '.join(targets)}, not of {arguments.to}"
            raise RunError(Problem(flag, fact, "leave it out"))
