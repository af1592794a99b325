"""Answers of a model whose tensors aren't all of one precision."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor


def autocast_forward(causal: Any, dtype: torch.dtype) -> None:
    """Lets a model answer whoever calls it, in `dtype`.

    torch multiplies no pair of precisions. While a model is trained the engine sees to that; who
    generates or compares logits wouldn't.
    """
    forward = causal.forward

    @wraps(forward)  # transformers looks at the names of its arguments
    def mixed(*given: Any, **named: Any) -> Any:
        tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
        with torch.autocast(next(tensors).device.type, dtype):
            return forward(*given, **named)

    causal.forward = mixed
