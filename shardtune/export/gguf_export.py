"""A run's model as one GGUF file, read back by the `gguf` package and by transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardtune.checkpoint.merge import LogitDifference
from shardtune.checkpoint.model_card import CARD_FILE
from shardtune.export.folder import ExportFacts, export_folder
from shardtune.export.gguf_hyperparameters import (
    GgufMetadata,
    gguf_family,
    hyperparameters,
)
from shardtune.export.gguf_readers import LlamaCppAgreement, TransformersAgreement, read_elsewhere
from shardtune.export.gguf_vocabulary import tokenizer_metadata
from shardtune.export.gguf_weights import gguf_tensors
from shardtune.export.gguf_write import (
    GgufReadBack,
    check_gguf,
    file_type,
    require_gguf_package,
    write_gguf,
)
from shardtune.export.source import ExportSource, WholeModel


@dataclass(frozen=True)
class GgufExport:
    """A GGUF file that holds what was trained."""

    file: str
    kind: str
    merged: LogitDifference | None
    read_back: GgufReadBack
    transformers: TransformersAgreement | None
    """None where transformers can't read the family from GGUF."""
    llama_cpp: LlamaCppAgreement | None
    """None where llama-cpp-python isn't installed."""


def export_gguf(source: ExportSource, target: Path, kind: str) -> GgufExport:
    """Writes `target`/model-KIND.gguf, with its template and stop tokens, and compares it."""
    facts = gguf_facts(source, "gguf", kind)
    with export_folder(target, facts) as partial:
        return write_model(source, partial, kind)


def gguf_facts(source: ExportSource, to: str, kind: str) -> ExportFacts:
    require_gguf_package()
    source.require_decoder(to)
    return ExportFacts(to, kind, source.base_name, sorted(source.stops), source.parity.compared)


def write_model(source: ExportSource, folder: Path, kind: str) -> GgufExport:
    """The file in a folder that is being filled, compared with the model that it was made of, and
    the model card."""
    if source.card:
        (folder / CARD_FILE).write_text(source.card, encoding="utf-8")
    whole = source.whole_model()
    path = folder / f"model-{kind.upper()}.gguf"
    metadata = model_metadata(source, whole, kind)
    weights = whole.weights()

    def tensors() -> Any:
        return gguf_tensors(whole.config, weights)

    with torch.no_grad():
        write_gguf(path, gguf_family(whole.config).architecture, metadata, tensors, kind)
        read_back = check_gguf(path, metadata, tensors, kind)
    elsewhere = read_elsewhere(path, whole, source.tokenizer, kind)
    return GgufExport(path.name, kind, whole.merged, read_back, *elsewhere)


def model_metadata(source: ExportSource, whole: WholeModel, kind: str) -> GgufMetadata:
    """Every key of the file."""
    return {
        "general.type": "model",
        "general.name": source.base_name,
        "general.finetune": source.run.path.name,
        "general.file_type": file_type(kind),
        "general.quantization_version": 2,
        **hyperparameters(whole.config),
        **tokenizer_metadata(source.tokenizer, whole.config.vocab_size, source.stops),
    }
