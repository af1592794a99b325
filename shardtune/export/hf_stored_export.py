"""An nf4 or int8 run as it was trained: the quantized model as stored, and its adapter unmerged.

One Hugging Face folder holds both, and `from_pretrained` of plain transformers puts the one on the
other without quantizing anything. Merged weights would have to be quantized anew, which loses of
the small correction what half a step of a 4-bit code hides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shardtune.checkpoint.base_files import leave_base
from shardtune.checkpoint.merge import tokenize_prompts
from shardtune.checkpoint.model_card import CARD_FILE, card_beside_base
from shardtune.data.template_parity import folder_reader, require_parity, training_reader
from shardtune.errors import Problem, RunError
from shardtune.export.folder import ExportFacts, export_folder
from shardtune.export.hf_folder_export import SHARD_SIZE
from shardtune.export.source import ExportSource
from shardtune.export.stored_read_back import (
    AS_STORED,
    StoredAgreement,
    compare_stored,
    load_stored_folder,
    require_same_weights,
)
from shardtune.models.load import COMPUTE_DTYPES
from shardtune.models.load_result import load_stored, load_to_merge
from shardtune.models.quantization.bitsandbytes_layers import (
    require_bitsandbytes_layers,
    to_bitsandbytes,
)

_SETTINGS = "adapter_config.json"
_MERGED = f"export the merged model, whose weights are dequantized: leave out {AS_STORED}"


@dataclass(frozen=True)
class StoredExport:
    """A folder with quantized weights and the adapter that was trained on them."""

    quantization: str
    layers: int
    """How many have quantized weights."""
    bytes: int
    """Of the model's weights, without the adapter."""
    read_back: StoredAgreement


def export_stored(source: ExportSource, target: Path) -> StoredExport:
    """Writes both to `target`, and reads them back through plain transformers."""
    kind = require_stored(source)
    facts = ExportFacts("hf", kind, source.base_name, sorted(source.stops), source.parity.compared)
    trained_in = source.job.train.compute_precision
    with export_folder(target, facts) as partial:
        base = load_stored(source.files, trained_in)
        layers = to_bitsandbytes(base, AS_STORED, _MERGED)
        _require_frozen(source, layers)
        source.copy_result(partial)
        base.generation_config.eos_token_id = sorted(source.stops)
        base.save_pretrained(partial, max_shard_size=SHARD_SIZE)
        leave_base(partial, source.files)
        card = partial / CARD_FILE
        if card.is_file():
            text = card_beside_base(card.read_text(encoding="utf-8"), source.files.loader, kind)
            card.write_text(text, encoding="utf-8")
        trusted = source.job.model.trust_remote_code
        back = load_stored_folder(partial, base.config, trust_remote_code=trusted)
        adapted = load_to_merge(str(source.run.result), source.files, trained_in)
        require_same_weights(back, base, adapted)
        inputs = tokenize_prompts(source.tokenizer, source.prompts, adapted)
        found = compare_stored(back, adapted, layers, inputs, COMPUTE_DTYPES[trained_in])
        trained = training_reader(source.files.tokenizer, source.files.stop_ids)
        require_parity(trained, [folder_reader(partial)], source.files.tokenizer)
        size = sum(file.stat().st_size for file in partial.glob("model*.safetensors"))
    return StoredExport(kind, len(layers), size, found)


def require_stored(source: ExportSource) -> str:
    """How the run's base is stored, `nf4` or `int8`; RunError for others, and ModelError where
    bitsandbytes can't do it on this machine."""
    kind = source.job.model.quantization
    if kind not in ("nf4", "int8"):
        fact = f"the run has no nf4 or int8 weights: its model.quantization is {kind}"
        raise RunError(Problem(AS_STORED, fact, f"leave out {AS_STORED}"))
    settings = json.loads((source.run.result / _SETTINGS).read_text(encoding="utf-8"))
    if settings.get("use_dora"):
        fact = "transformers reads an adapter's factors, and not the magnitudes of DoRA"
        raise RunError(Problem(AS_STORED, fact, _MERGED))
    require_bitsandbytes_layers(kind, AS_STORED, _MERGED)
    return kind


def _require_frozen(source: ExportSource, layers: list[str]) -> None:
    """Refuses an adapter that brings whole weights for a layer which is written quantized."""
    settings = json.loads((source.run.result / _SETTINGS).read_text(encoding="utf-8"))
    whole = {name.rsplit(".", 1)[-1] for name in settings.get("modules_to_save") or ()}
    both = [name for name in layers if not whole.isdisjoint(name.split("."))]
    if both:
        fact = f"the adapter brings whole weights (modules_to_save) for quantized layers: {both[0]}"
        raise RunError(Problem(AS_STORED, fact, _MERGED))
