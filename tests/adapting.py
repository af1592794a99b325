"""An adapter in a model that has its weights."""

from __future__ import annotations

from torch import nn

from shardtune.config.job import Adapter
from shardtune.models.peft_adapters import initialize_adapters, insert_adapters


def add_adapter(model: nn.Module, adapter: Adapter, *, seed: int) -> nn.Module:
    """The model with `adapter` in it, which has its first values."""
    adapted = insert_adapters(model, adapter)
    initialize_adapters(
        adapted, "", adapter, seed=seed, device=str(next(model.parameters()).device)
    )
    return adapted
