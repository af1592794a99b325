"""Mixtures of experts as config.json describes them: how many experts a token goes through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_ALL = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def active_experts(config: Mapping[str, Any]) -> int:
    """The routed experts of a token; 0 where config.json describes no mixture."""
    inner = config.get("text_config")
    found = inner if isinstance(inner, Mapping) else config
    if not any(_count(found, key) for key in _ALL):
        return 0
    return next((count for key in _ACTIVE if (count := _count(found, key))), 0)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, list | tuple):  # one for each layer
        value = max(value, default=0)
    return value if isinstance(value, int) else 0
