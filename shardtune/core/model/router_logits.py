"""Mixtures whose configuration asks for the routers' logits, and with them for a loss of balance.

transformers computes that loss from the mask of the tokens at hand. With a cache the mask is as
long as the cache, and the two don't fit: generation of such a model ends in an error.
"""

from __future__ import annotations

import inspect
from typing import Any

_NAME = "output_router_logits"


def without_router_logits(plain: Any) -> dict[str, bool]:
    """What a forward pass with a cache is told; nothing where there is nothing to tell."""
    asked = getattr(plain.config.get_text_config(), _NAME, False)
    return {_NAME: False} if asked and _NAME in inspect.signature(plain.forward).parameters else {}
