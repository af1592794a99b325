"""The shape of the built-in model `tiny`, which planner and model share."""

from __future__ import annotations

from typing import Any

TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 260,  # the 256 bytes, then four special tokens
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""As in config.json. A change needs a new `TINY_FOLDER` (`models/tiny.py`)."""
