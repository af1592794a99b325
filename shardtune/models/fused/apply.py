"""How the layers of a model are run: as transformers writes them, or fused, compiled and with
selective activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardtune.compat.torch_compiler import (
    raise_recompile_limit,
    read_rows_once,
    report_compiling,
)
from shardtune.config.job import Adapter, LoRA, NoAdapter, TrainSection
from shardtune.core.host.heartbeat import own_heartbeat
from shardtune.core.setup import Recompute
from shardtune.models.fused.activation_checkpointing import (
    checkpoint_activations,
    checkpoint_whole_layers,
)
from shardtune.models.fused.full_finetune import fuse_full


@dataclass(frozen=True)
class LayerSetup:
    """What the job says of how layers are run: compiled, and what they recompute."""

    compiled: bool = False
    recompute: Recompute = "none"
    kept: int = 0
    """The last layers, which recompute nothing."""

    @property
    def changes_layers(self) -> bool:
        return self.compiled or self.recompute in ("mlp", "most")

    @classmethod
    def of(cls, train: TrainSection) -> LayerSetup:
        return cls(train.kernels == "compiled", train.recompute, train.keep_layers)


def pack_weights(layers: Iterable[nn.Module]) -> None:
    """Packs the weights of layers that share an input into one matrix: after `apply_fused_layers`,
    once the weights are whole and where they stay."""
    packed = False
    for layer in layers:
        for module in layer.modules():
            pack = getattr(module, "pack_weights", None)
            if pack is not None:
                pack()
                packed = True
    if packed:
        # What weights have left is a little too small for those that stand together now. Unless the
        # allocator gives it back, it keeps gigabytes of it. Without a GPU this does nothing.
        torch.cuda.empty_cache()


def apply_fused_layers(
    causal: Any, layers: Sequence[nn.Module], adapter: Adapter, setup: LayerSetup
) -> None:
    """Fuses, checkpoints and compiles `layers` of a model that has its adapters. They may be
    without weights still.

    Compiling itself happens when a layer first runs; layers that are alike share the result.
    """
    what, family = setup.recompute, causal.config.get_text_config().model_type
    if what == "full":
        checkpoint_whole_layers(causal)
    if setup.compiled and isinstance(adapter, LoRA):
        from shardtune.models.fused.lora import fuse_lora  # peft is slow to import

        for layer in layers:
            fuse_lora(layer, family)
    if setup.compiled and isinstance(adapter, NoAdapter):
        for layer in layers:
            fuse_full(layer, family)
    for number, layer in enumerate(layers):
        if setup.changes_layers:
            # A layer that is run again as a whole keeps for a moment what it would otherwise.
            keeps = what == "full" or number >= len(layers) - setup.kept
            checkpoint_activations(layer, "none" if keeps else what)
        if setup.compiled:
            layer.compile()
    if setup.compiled:
        heartbeat = own_heartbeat()
        report_compiling(heartbeat.compile_began, heartbeat.compile_ended)
        read_rows_once()
        raise_recompile_limit()
