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


def kind_of(config: Any) -> ModelKind:
    """The kind that a configuration of transformers, or a config.json, describes."""
    if isinstance(config, Mapping):
        return "encoder_decoder" if config.get("is_encoder_decoder") else "decoder"
    return "encoder_decoder" if getattr(config, "is_encoder_decoder", False) else "decoder"
