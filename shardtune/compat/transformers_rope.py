"""RoPE: transformers leaves alone queries and keys that our kernel has rotated already."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from shardtune.compat.versioned_change import TargetChanged, change

APPLY_ROPE = "apply_rotary_pos_emb"
"""What the code of each family calls the function that rotates queries and keys."""


@change(
    "transformers", since="5.0", before="6", lost="queries and keys are rotated by transformers"
)
def skip_if_rotated(module: str) -> bool:
    """Lets the code of a family leave alone what comes without angles: it is rotated already.
    False if the family has no such code."""
    code: Any = sys.modules[module]
    own = getattr(code, APPLY_ROPE, None)
    if own is None:
        return False
    if not getattr(own, "skips_if_rotated", False):
        first = list(inspect.signature(own).parameters)[:4]
        if first != ["q", "k", "cos", "sin"]:
            raise TargetChanged(f"{module}.{APPLY_ROPE} takes {', '.join(first)}")
        setattr(code, APPLY_ROPE, _leaving(own))
    return True


def _leaving(rotate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(rotate)
    def unless_rotated(q: Any, k: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
        return (q, k) if cos is None else rotate(q, k, cos, sin, *more, **named)

    unless_rotated.skips_if_rotated = True  # type: ignore[attr-defined]
    return unless_rotated
