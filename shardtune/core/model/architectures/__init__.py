"""The architectures whose tensors we know, each as a function from its config to a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from shardtune.core.model.architectures.deepseek import deepseek
from shardtune.core.model.architectures.fields import Fields
from shardtune.core.model.architectures.gemma4 import gemma4_text
from shardtune.core.model.architectures.gpt import (
    bloom,
    codegen,
    falcon,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    mpt,
    opt,
    persimmon,
    phi,
    xglm,
)
from shardtune.core.model.architectures.ia3 import ia3_modules
from shardtune.core.model.architectures.llama import llama_like
from shardtune.core.model.architectures.seq2seq import bart, t5
from shardtune.core.model.architectures.traits import TRAITS
from shardtune.core.model.kind import require_trained_family
from shardtune.core.model.shape import ModelShape
from shardtune.errors import ModelError, Problem, did_you_mean

__all__ = ["SHAPE_READERS", "ia3_modules", "read_shape"]

SHAPE_READERS: dict[str, Callable[[Fields, str], ModelShape]] = {
    **dict.fromkeys(TRAITS, llama_like),
    "bart": bart,
    "bloom": bloom,
    "codegen": codegen,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "falcon": falcon,
    "gemma4_text": gemma4_text,
    "gpt2": gpt2,
    "gpt_bigcode": gpt2,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "mpt": mpt,
    "mt5": t5,
    "opt": opt,
    "persimmon": persimmon,
    "phi": phi,
    "t5": t5,
    "xglm": xglm,
}
"""By transformers' model_type."""


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config.json describes."""
    family = config.get("model_type")
    place = f"{name} config.json: model_type"
    if not isinstance(family, str):
        fact = "is missing" if family is None else f"is {family!r}, not a word"
        raise ModelError(Problem(place, fact, "name a config.json of transformers"))
    require_trained_family(config, name)
    inner = config.get("text_config")
    if family not in SHAPE_READERS and isinstance(inner, Mapping):
        fact = f"{family!r} also takes pictures or sounds; what reads those isn't planned"
        fix = "to plan its text part alone, name a file with its text_config"
        if inner.get("model_type") not in SHAPE_READERS:
            fact += f", nor is its text part ({inner.get('model_type')!r})"
            fix = f"plan a model of text alone; known are {', '.join(sorted(SHAPE_READERS))}"
        raise ModelError(Problem(place, fact, fix))
    if family not in SHAPE_READERS:
        near = did_you_mean(family, SHAPE_READERS)
        known = f"known are {', '.join(sorted(SHAPE_READERS))}"
        fix = f"did you mean {near!r}? {known}" if near else known
        raise ModelError(Problem(place, f"{family!r} is an architecture we don't know", fix))
    fields = Fields(config, name)
    shape = SHAPE_READERS[family](fields, family)
    fields.done()
    return _first_read(shape)


@lru_cache(maxsize=256)
def _first_read(shape: ModelShape) -> ModelShape:
    """The shape itself, or the equal one that was read before: what was counted of that is cached,
    and one object is found there at once."""
    return shape
