"""LongRoPE: a text above some length is rotated otherwise than shorter ones, all of it."""

from __future__ import annotations

from typing import Any


def longest_short_text(config: Any) -> int | None:
    """Tokens of the longest text that has the frequencies of short ones. What a KV cache holds of
    it is void once it grows by another token. None for models without LongRoPE."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope["original_max_position_embeddings"])
