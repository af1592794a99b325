"""The conformance table: every strategy with every kind of adapter, one row each.

A row says what to build. `guarantees.py` says what must hold for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One combination, on real gloo ranks."""

    strategy: str
    settings: dict[str, Any]
    adapter: str
    ranks: int = 2
    needs: str = ""
    """A Python package that this row can't do without."""

    @property
    def id(self) -> str:
        return f"{self.strategy}-{self.adapter}"


ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"type": "none"}, "none"),
    "lora": ({"type": "lora", "rank": 4, "alpha": 8}, "none"),
    "ia3": ({"type": "ia3"}, "none"),
    "qlora": ({"type": "lora", "rank": 4, "alpha": 8}, "nf4"),
}
"""What an adapter's name in a row's id means: the job's `adapter` and `model.quantization`."""


def _zero(stage: int, **settings: Any) -> dict[str, Any]:
    # By default DeepSpeed keeps small weights whole, and gathered ones as long as there are not
    # too many: the tiny model would never be divided, nor gathered twice.
    kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
    nothing = {f"stage3_{key}": 0 for key in kept} if stage == 3 else {}
    return {"type": "deepspeed", "zero_optimization": {"stage": stage, **nothing, **settings}}


_CPU = {"device": "cpu"}

STRATEGIES: dict[str, tuple[dict[str, Any], int, str]] = {
    "ddp": ({"type": "ddp"}, 2, ""),
    "fsdp": ({"type": "fsdp"}, 2, ""),
    "fsdp-keep": ({"type": "fsdp", "reshard_after_forward": False}, 2, ""),
    "fsdp-hybrid": ({"type": "fsdp", "sharding": "hybrid", "replicas": 2}, 4, ""),
    "fsdp-offload": ({"type": "fsdp", "offload": "cpu"}, 2, ""),
    "zero0": (_zero(0), 2, "deepspeed"),
    "zero1": (_zero(1), 2, "deepspeed"),
    "zero2": (_zero(2), 2, "deepspeed"),
    "zero3": (_zero(3), 2, "deepspeed"),
    "zero3-hpz": (_zero(3, zero_hpz_partition_size=2), 4, "deepspeed"),
    "zero2-offload": (_zero(2, offload_optimizer=_CPU), 2, "deepspeed"),
    "zero3-offload": (_zero(3, offload_optimizer=_CPU, offload_param=_CPU), 2, "deepspeed"),
}
"""Settings, ranks and the package needed, by the strategy's name in a row's id."""

ROWS: tuple[Row, ...] = tuple(
    Row(name, settings, adapter, ranks, needs)
    for name, (settings, ranks, needs) in STRATEGIES.items()
    for adapter in ADAPTERS
)
