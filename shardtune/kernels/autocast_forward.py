"""Autocast for whoever calls a model directly, where its tensors aren't all of one dtype."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor


def autocast_forward(causal: Any, dtype: torch.dtype) -> None:
    """Wraps the model's forward in `torch.autocast(dtype)`.

    torch multiplies no two dtypes. In training the engine opens the autocast region; generation and
    the comparison of logits wouldn't.
    """
    forward = causal.forward

    @wraps(forward)  # transformers looks at the names of its arguments
    def mixed(*given: Any, **named: Any) -> Any:
        tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
        with torch.autocast(next(tensors).device.type, dtype):
            return forward(*given, **named)

    causal.forward = mixed
