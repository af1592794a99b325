"""What an engine has to know about a run besides the model and the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardtune.core.schedule import Schedule

Precision = Literal["fp32", "bf16", "fp16"]
Loss = Literal["plain", "fused"]


@dataclass(frozen=True)
class OptimizerSetup:
    """The update rule. Fields that a rule doesn't use keep their defaults."""

    type: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EngineSetup:
    """One optimizer step, described: precision, update, schedule, clipping, randomness."""

    precision: Precision
    optimizer: OptimizerSetup
    schedule: Schedule
    max_grad_norm: float | None
    seed: int
    micro_batch: int = 1
    """Rows of one forward pass."""
    accumulation: int = 1
    """Micro-batches of a step on each rank; the last step of a run may have fewer."""
    loss: Loss = "plain"
    """`fused` never has all logits of a micro-batch at once."""
