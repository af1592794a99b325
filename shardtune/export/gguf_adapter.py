"""A LoRA adapter as GGUF: `llama-cli --lora` and Ollama's ADAPTER add it to its base model.

llama.cpp scales a product B A by alpha over its rank, the same alpha for all. Where peft scales
otherwise (rank-stabilised LoRA, alphas by pattern), B takes the difference up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtune.checkpoint.model_card import CARD_FILE
from shardtune.errors import Problem, RunError
from shardtune.export.folder import export_folder
from shardtune.export.gguf_export import gguf_facts
from shardtune.export.gguf_hyperparameters import GgufMetadata, gguf_family
from shardtune.export.gguf_weights import GgufNames, interleave_pairs, rotated_heads
from shardtune.export.gguf_write import check_gguf, gguf_weights_of, write_gguf
from shardtune.export.source import ExportSource
from shardtune.models.gguf import undo_permutation

_FILE = "adapter-F32.gguf"
_PART = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FIX = "export the merged model: leave out --adapter-only"


@dataclass(frozen=True)
class LoraPair:
    """The two factors of one module's change, and what their product is multiplied by."""

    name: str
    """The weight that is changed, as `model.layers.0.self_attn.q_proj.weight`."""
    down: Tensor
    up: Tensor
    scaling: float


@dataclass(frozen=True)
class GgufAdapter:
    """An adapter file that holds what was trained."""

    file: str
    modules: int
    error: float
    """The largest difference of a product of both factors."""


def export_gguf_adapter(source: ExportSource, target: Path) -> GgufAdapter:
    """Writes `target`/adapter-F32.gguf, and compares every product with the run's."""
    with export_folder(target, gguf_facts(source, "gguf", "f32")) as partial:
        config = source.files.config
        pairs = read_pairs(source)
        alpha = float(source.job.adapter.alpha)  # type: ignore[union-attr]
        path = partial / _FILE
        metadata: GgufMetadata = {
            "general.type": "adapter",
            "general.name": source.run.path.name,
            "general.file_type": 0,
            "adapter.type": "lora",
            "adapter.lora.alpha": alpha,
        }

        def tensors() -> Iterator[tuple[str, Tensor]]:
            return _tensors(config, pairs, alpha)

        write_gguf(path, gguf_family(config).architecture, metadata, tensors, "f32")
        check_gguf(path, metadata, tensors, "f32")
        error = _compare_products(path, config, pairs, alpha)
        card = source.run.result / CARD_FILE
        if card.is_file():
            (partial / CARD_FILE).write_text(card.read_text(encoding="utf-8"), encoding="utf-8")
    return GgufAdapter(_FILE, len(pairs), error)


def read_pairs(source: ExportSource) -> list[LoraPair]:
    """The factors in a result's folder; RunError for what llama.cpp has no place for."""
    from peft import PeftConfig
    from safetensors.torch import load_file

    adapter = source.job.adapter
    if adapter.type != "lora":
        raise _refuse(f"the run has no LoRA adapter (adapter.type: {adapter.type})")
    settings = PeftConfig.from_pretrained(str(source.run.result))
    if settings.use_dora:
        raise _refuse("DoRA rescales whole weights, which llama.cpp can't do to its base")
    stored = load_file(source.run.result / "adapter_model.safetensors")
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        found = _PART.fullmatch(name)
        if found is None:
            raise _refuse(f"{name} is no factor of a LoRA product")
        halves.setdefault(found[1], {})[found[2]] = tensor.float()
    return [
        LoraPair(f"{module}.weight", both["A"], both["B"], _scaling(settings, module, both["A"]))
        for module, both in halves.items()
    ]


def _scaling(settings: Any, module: str, down: Tensor) -> float:
    """What peft multiplies a product by."""
    alpha: float = settings.lora_alpha
    for pattern, other in (settings.alpha_pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = other
    rank = down.shape[0]
    return alpha / (rank**0.5 if settings.use_rslora else rank)


def _tensors(config: Any, pairs: list[LoraPair], alpha: float) -> Iterator[tuple[str, Tensor]]:
    names, interleaved = GgufNames(config), gguf_family(config).pairs_interleaved
    for pair in pairs:
        if pair.name == "lm_head.weight" and config.tie_word_embeddings:
            raise _refuse("the adapted lm_head is the embedding, which llama.cpp would change, too")
        if "embed_tokens" in pair.name:
            raise _refuse(f"{pair.name} is adapted; llama.cpp takes adapters of linear layers")
        up = pair.up * (pair.scaling * pair.down.shape[0] / alpha)
        if interleaved and (heads := rotated_heads(config, pair.name)):
            up = interleave_pairs(up, heads)
        name = names.of(pair.name)
        yield f"{name}.lora_a", pair.down.contiguous()
        yield f"{name}.lora_b", up.contiguous()


def _compare_products(path: Path, config: Any, pairs: list[LoraPair], alpha: float) -> float:
    """The largest difference between what the file adds to a weight, and what the run adds."""
    stored = {name: torch.from_numpy(array.copy()) for name, array in gguf_weights_of(path)}
    names, interleaved = GgufNames(config), gguf_family(config).pairs_interleaved
    largest = 0.0
    for pair in pairs:
        name = names.of(pair.name)
        down, up = stored[f"{name}.lora_a"], stored[f"{name}.lora_b"]
        added = (up @ down) * (alpha / down.shape[0])
        if interleaved and (heads := rotated_heads(config, pair.name)):
            added = undo_permutation(added, heads)
        wanted = (pair.up @ pair.down) * pair.scaling
        off = (added - wanted).abs().max().item()
        if not off <= 1e-5 * max(1e-30, wanted.abs().max().item()):
            raise _refuse(f"read back, {pair.name} is changed otherwise, by {off:.2g}")
        largest = max(largest, off)
    return largest


def _refuse(fact: str) -> RunError:
    return RunError(Problem("--adapter-only", fact, _FIX))
