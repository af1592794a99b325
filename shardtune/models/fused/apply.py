"""How the layers of a model are run: as transformers writes them, or the fast way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.callback import callback_handler

from shardtune.config.job import Adapter, LoRA, NoAdapter, TrainSection
from shardtune.core.heartbeat import own_heartbeat
from shardtune.core.setup import Recompute
from shardtune.models.fused.activation_checkpointing import (
    checkpoint_activations,
    checkpoint_whole_layers,
)
from shardtune.models.fused.full_finetune import fuse_full

RECOMPILE_LIMIT = 64
"""How often the code of a layer may be compiled: with and without gradients, in training and
evaluation, for rows of few lengths. Beyond it torch would go on uncompiled, with a mere warning."""


@dataclass(frozen=True)
class LayerSetup:
    """What the job says of it."""

    compiled: bool = False
    recompute: Recompute = "none"
    kept: int = 0
    """Layers, the last ones, that keep more."""

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
    """Prepares `layers` of a model that has its adapters. They may be without weights still.

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
        tell_of_compiling()
        read_rows_once()
        torch._dynamo.config.recompile_limit = max(
            RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit
        )


def tell_of_compiling() -> None:
    """Lets whoever watches the process know: a row count that is new is compiled in any step, and
    takes longer than a step may."""
    heartbeat, calls = own_heartbeat(), callback_handler
    if heartbeat.compile_began not in calls.start_callbacks:
        calls.register_start_callback(heartbeat.compile_began)
        calls.register_end_callback(heartbeat.compile_ended)


WHOLE_ROW = 8192
"""Numbers of a row that a processor of the GPU has at once."""


def read_rows_once() -> None:
    """Lets torch's compiler hold whole rows where it sums over them, as norms do. By itself it does
    so up to 1,024 numbers, and reads longer rows once to sum and once more to use the sum. Where
    torch decides in another way than it does today, it is left to it."""
    try:
        from torch._inductor import config
        from torch._inductor.choices import InductorChoices
        from torch._inductor.runtime.hints import ReductionHint
        from torch._inductor.virtualized import V

        usual = InductorChoices.should_use_persistent_reduction
    except (ImportError, AttributeError):
        return
    if hasattr(usual, "usual"):
        return

    def whole_rows(features: Any, cooperative_reduction: bool) -> bool:
        if usual(features, cooperative_reduction):
            return True
        if cooperative_reduction or not config.triton.persistent_reductions:
            return False
        return bool(
            features.get_reduction_hint() == ReductionHint.INNER
            and V.graph.get_current_device_or_throw().type == "cuda"
            and V.graph.sizevars.statically_known_leq(features.reduction_numel, WHOLE_ROW)
        )

    whole_rows.usual = usual  # type: ignore[attr-defined]
    choices: Any = InductorChoices
    choices.should_use_persistent_reduction = staticmethod(whole_rows)
