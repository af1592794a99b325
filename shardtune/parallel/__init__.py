"""One file a strategy: its fields, the layout that declares it, and the engine that it builds.

A new strategy is one file here and one member of this union.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from shardtune.parallel.auto.strategy import AutoStrategy, OrShort, spelt_out
from shardtune.parallel.ddp.strategy import DDP
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.parallel.layers.strategy import Layers
from shardtune.parallel.pipeline.strategy import Pipeline
from shardtune.parallel.tensor.strategy import Tensor

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
