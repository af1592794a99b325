"""The kind of a model: a decoder alone (causal language model), or an encoder with a decoder
(sequence-to-sequence).

All that follows from it asks here: which class of transformers loads the model, how a row becomes
tokens, what its forward pass is told, which strategies take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

ModelKind = Literal["decoder", "encoder_decoder"]
"""`decoder` continues one sequence; `encoder_decoder` reads a source and writes a target."""

_WITH_ENCODER = frozenset({"bart", "mt5", "t5"})
"""Families (transformers' `model_type`) that have an encoder unless their config.json denies it."""


def kind_of(config: Any) -> ModelKind:
    """The kind that a configuration of transformers, or a config.json, describes."""
    if isinstance(config, Mapping):
        both = config.get("is_encoder_decoder", config.get("model_type") in _WITH_ENCODER)
    else:
        both = getattr(config, "is_encoder_decoder", False)
    return "encoder_decoder" if both else "decoder"
