"""What peft wraps around a model and its layers, and how it is taken off: the one place."""

from __future__ import annotations

import re
from typing import Any

_MODEL_PREFIX = "base_model.model."
_LAYER_WRAPPERS = frozenset({"base_layer", "original_module"})


def unwrap_model(model: Any) -> Any:
    """The model inside `PeftModel`; `model` itself where nothing is wrapped."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if unwrap else model


def unwrap_name(name: str) -> str:
    """The name that a weight has without peft."""
    words = name.removeprefix(_MODEL_PREFIX).split(".")
    return ".".join(word for word in words if word not in _LAYER_WRAPPERS)


def unwrap_copies(name: str) -> str:
    """The name without what peft puts into it where a module, or a block around it, is to be saved:
    `mlp.modules_to_save.default.up_proj` is `mlp.up_proj`."""
    return re.sub(r"\b(?:modules_to_save\.[^.]+|original_module)\.", "", name)
