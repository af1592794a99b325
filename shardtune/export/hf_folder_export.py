"""An ordinary Hugging Face folder: merged weights in shards, template, stop tokens, model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from shardtune.checkpoint.base_files import leave_base
from shardtune.checkpoint.merge import (
    LogitDifference,
    cost_of_bf16,
    require_read_back,
    round_weights,
)
from shardtune.checkpoint.model_card import CARD_FILE
from shardtune.data.template_parity import folder_reader, require_parity, training_reader
from shardtune.export.folder import ExportFacts, export_folder
from shardtune.export.source import ExportSource

SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class HfExport:
    """A folder that transformers reads as it was written."""

    dtype: str
    shards: int
    merged: LogitDifference | None
    rounded: LogitDifference
    in_bf16: float | None
    """How far bf16 would move a logit; None where the files are no larger than that."""


def export_hf(source: ExportSource, target: Path, dtype: torch.dtype, to: str = "hf") -> HfExport:
    """Writes the whole model to `target`, and reads it back through plain transformers."""
    word = str(dtype).removeprefix("torch.")
    facts = ExportFacts(to, word, source.base_name, sorted(source.stops), source.parity.compared)
    with export_folder(target, facts) as partial:
        whole = source.whole_model()
        in_fp32 = dtype == torch.float32
        in_bf16 = cost_of_bf16(whole.model, whole.inputs) if in_fp32 else None
        rounded = round_weights(whole.model, whole.inputs, dtype)
        whole.model.config.dtype = dtype
        whole.model.generation_config.eos_token_id = sorted(source.stops)
        whole.model.save_pretrained(partial, max_shard_size=SHARD_SIZE)
        source.tokenizer.save_pretrained(partial)
        leave_base(partial, source.files)
        if source.card:
            (partial / CARD_FILE).write_text(source.card, encoding="utf-8")
        require_read_back(whole.model, partial)
        trained = training_reader(source.files.tokenizer, source.files.stop_ids)
        require_parity(trained, [folder_reader(partial)], source.files.tokenizer)
        shards = len(list(partial.glob("*.safetensors")))
    return HfExport(word, shards, whole.merged, rounded, in_bf16)
