"""How the layers of a model are run: as transformers writes them, or the fast way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn

from shardtune.core.setup import Recompute
from shardtune.job import Adapter, LoRA, TrainSection
from shardtune.models.recompute import recompute

GRAPHS = 64
"""How often the code of a layer may be compiled: with and without gradients, in training and
evaluation, for rows of few lengths. Beyond it torch would go on uncompiled, with a mere warning."""


@dataclass(frozen=True)
class Speed:
    """What the job says of it."""

    compiled: bool = False
    recompute: Recompute = "none"
    kept: int = 0
    """Layers, the last ones, that keep more."""

    @property
    def changes_layers(self) -> bool:
        return self.compiled or self.recompute in ("mlp", "most")

    @classmethod
    def of(cls, train: TrainSection) -> Speed:
        return cls(train.kernels == "compiled", train.recompute, train.keep_layers)


def hasten(causal: Any, layers: Sequence[nn.Module], adapter: Adapter, speed: Speed) -> None:
    """Prepares `layers` of a model that has its adapters. They may be without weights still.

    Compiling itself happens when a layer first runs; layers that are alike share the result.
    """
    what = speed.recompute
    if what == "full":
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    if speed.compiled and isinstance(adapter, LoRA):
        from shardtune.models.lora import quicken  # peft is slow to import

        for layer in layers:
            quicken(layer, causal.config.get_text_config().model_type)
    for number, layer in enumerate(layers):
        if speed.changes_layers:
            # A layer that is run again as a whole keeps for a moment what it would otherwise.
            keeps = what == "full" or number >= len(layers) - speed.kept
            recompute(layer, "none" if keeps else what)
        if speed.compiled:
            layer.compile()
    if speed.compiled:
        torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
