"""Dead adapters: LoRA modules that a run never trained. Their B factor is still all zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardtune.core.runs.metrics import CurveWarning

if TYPE_CHECKING:
    from torch import Tensor

FIRST_UPDATES = 5  # before that a warmup may have moved nothing yet
_SHOWN = 3  # names that the line holds


def dead_adapters(trained: Mapping[str, Tensor], updates: int) -> list[str]:
    """The modules of LoRA that add nothing to their layer after so many updates: B begins as zero,
    and any update that reaches it changes that."""
    if updates < FIRST_UPDATES:
        return []
    return [
        name.partition(".lora_B")[0]
        for name, weight in trained.items()
        if ".lora_B" in name and not bool(weight.any())
    ]


def dead_adapter_warning(step: int, names: Sequence[str]) -> CurveWarning:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    modules = "adapter was" if len(names) == 1 else "adapters were"
    fact = (
        f"{len(names)} {modules} never trained, their B is still zero: "
        f"{', '.join(names[:_SHOWN])}{more}; take them out of adapter.targets, or look for what "
        "keeps gradients from them"
    )
    return CurveWarning(kind="warning", step=step, about="dead_adapter", fact=fact)
