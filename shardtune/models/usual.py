"""Lets 8-bit layers hear what goes into them, before they are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Texts = Sequence[Sequence[int]]
"""Token ids."""


@torch.no_grad()
def hear(model: Any, texts: Texts, device: str, compute: torch.dtype) -> None:
    """Runs `texts` through a model that has its weights, one after the other: a pass over its
    layers each, without its head. Adapters add nothing yet."""
    from shardtune.models.fp8 import FP8Linear

    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
    holders = [layer for layer in layers if layer.whole is layer]
    for layer in holders:
        layer.listen()
    # Each text has a length of its own, for which nothing is to be compiled.
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.autocast(torch.device(device).type, compute):
        for text in texts:
            causal.base_model(input_ids=torch.tensor([list(text)], device=device), use_cache=False)
    for layer in holders:
        layer.conclude()
