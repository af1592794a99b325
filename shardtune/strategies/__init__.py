"""One file a strategy: its fields, the layout that declares it, and the engine that it builds.

A new strategy is one file here and one member of this union.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from shardtune.strategies.auto import AutoStrategy, OrShort, spelt_out
from shardtune.strategies.ddp import DDP
from shardtune.strategies.deepspeed import DeepSpeed
from shardtune.strategies.fsdp import FSDP
from shardtune.strategies.layers import Layers
from shardtune.strategies.pipeline import Pipeline
from shardtune.strategies.tensor import Tensor

Strategy = Annotated[
    AutoStrategy | DDP | FSDP | DeepSpeed | Tensor | Pipeline | Layers,
    BeforeValidator(spelt_out),
    Field(discriminator="type"),
    OrShort(),
]
"""Every strategy that a job can name."""

__all__ = [
    "DDP",
    "FSDP",
    "AutoStrategy",
    "DeepSpeed",
    "Layers",
    "Pipeline",
    "Strategy",
    "Tensor",
]
