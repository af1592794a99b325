"""Loads the result of a run as anybody would."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from shardtune.compat.quiet import quiet_adapter_warnings
from shardtune.config.job import ModelSection
from shardtune.core.setup import Precision
from shardtune.models.experts.expert_lora import hand_over_factors
from shardtune.models.fused.apply import LayerSetup
from shardtune.models.load import load_base
from shardtune.models.materialize import build_model
from shardtune.models.model_files import ModelFiles, explaining
from shardtune.models.quantization.quantized_experts import QuantizedExperts, shown_unpacked
from shardtune.models.quantization.swap import dequantize

_FIX = "write it again: shardtune train RUN/job.yaml --resume"


def load_result(folder: str, base: ModelFiles, precision: Precision) -> Any:
    """A result as anybody would load it: an adapter on its model (`base`), or a whole model.

    An adapter that was trained on quantized weights is put on weights that are quantized the same
    way; `load_to_merge` has the same weights dequantized. 8-bit floating point is a way to multiply
    faster while training, not another model: its adapter is put on the original weights.
    """
    if not (Path(folder) / "adapter_config.json").is_file():
        own = {"name": folder, "revision": None, "add_tokens": ()}  # it has them already
        whole = base.section.model_copy(update=own)
        return load_base(ModelFiles(whole), precision)
    return _with_adapter(load_stored(base, precision), folder)


def load_to_merge(folder: str, base: ModelFiles, trained_in: Precision) -> Any:
    """The adapter on the weights that it was trained on, all in fp32 and none of them packed.

    Quantized weights are restored to the values that they had in training: the adapter corrects
    those, and with DoRA it is measured by them. `trained_in` is what they were restored to then.
    """
    if base.section.quantization in ("none", "fp8"):
        return _with_adapter(load_base(base, "fp32"), folder)
    return _with_adapter(dequantize(load_stored(base, trained_in)).float(), folder)


def _with_adapter(model: Any, folder: str) -> Any:
    from peft import PeftModel
    from transformers import GenerationConfig

    with explaining(folder, folder, _FIX), warnings.catch_warnings():
        quiet_adapter_warnings()
        # The result knows better than its model where answers end.
        model.generation_config = GenerationConfig.from_pretrained(folder)
        with shown_unpacked(model):
            adapted = PeftModel.from_pretrained(model, folder)
            _hand_over_factors(adapted)
        return adapted


def attach_adapter(model: Any, folder: str, name: str) -> Any:
    """A further adapter by its name, beside those that the model has."""
    from peft import PeftModel

    with explaining(folder, folder, _FIX), warnings.catch_warnings():
        quiet_adapter_warnings()
        with shown_unpacked(model):
            adapted = model
            if isinstance(model, PeftModel):
                model.load_adapter(folder, adapter_name=name)
            else:
                adapted = PeftModel.from_pretrained(model, folder, adapter_name=name)
            _hand_over_factors(adapted)
        return adapted


def _hand_over_factors(adapted: Any) -> None:
    """To packed experts: peft itself would add a correction to the bytes that they are in."""
    packed = [module for module in adapted.modules() if isinstance(module, QuantizedExperts)]
    if packed:
        hand_over_factors(adapted, packed[0].compute_dtype)


def load_stored(files: ModelFiles, precision: Precision) -> Any:
    """The model without an adapter, its frozen weights stored as the section says."""
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
