"""Loads the result of a run as anybody would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardtune.config.job import ModelSection
from shardtune.core.setup import Precision
from shardtune.models.fused.apply import LayerSetup
from shardtune.models.load import load_base
from shardtune.models.materialize import build_model
from shardtune.models.model_files import ModelFiles, explaining

_FIX = "write it again: shardtune train RUN/job.yaml --resume"


def load_result(folder: str, base: ModelFiles, precision: Precision) -> Any:
    """A result as anybody would load it: an adapter on its model (`base`), or a whole model.

    An adapter that was trained on quantized weights is put on weights that are quantized the same
    way. To merge it, load it on the original ones (`unquantized`). 8-bit floating point is a way to
    multiply faster while training, not another model: its adapter is put on the original ones.
    """
    if not (Path(folder) / "adapter_config.json").is_file():
        own = {"name": folder, "revision": None, "add_tokens": ()}  # it has them already
        whole = base.section.model_copy(update=own)
        return load_base(ModelFiles(whole), precision)
    from peft import PeftModel
    from transformers import GenerationConfig

    model = _load(base, precision)
    with explaining(folder, folder, _FIX):
        # The result knows better than its model where answers end.
        model.generation_config = GenerationConfig.from_pretrained(folder)
        return PeftModel.from_pretrained(model, folder)


def unquantized(section: ModelSection) -> ModelSection:
    """The same model with all its digits."""
    return section.model_copy(update={"quantization": "none"})


def _load(files: ModelFiles, precision: Precision) -> Any:
    if files.section.quantization in ("none", "fp8"):
        return load_base(files, precision)
    seed = 0  # nothing is drawn
    return build_model(
        files, None, precision=precision, seed=seed, speed=LayerSetup(), device="cpu"
    )


def load_result_tokenizer(folder: str, section: ModelSection) -> Any:
    """The tokenizer that was saved with a result. The folder of an adapter is no model's folder."""
    from transformers import AutoTokenizer

    with explaining(folder, folder, _FIX):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
