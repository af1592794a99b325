"""The schedules of `torch.distributed.pipelining`, by our names, with a clock on their stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from shardtune.core.pipelining import Pipelining
from shardtune.engines.stopwatch import Stopwatch


def make_schedule(
    pipelining: Pipelining,
    ranks: int,
    stages: list[Any],
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Runs so many micro-batches through this rank's stages, and adds up their gradients."""
    settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if pipelining.kind == "interleaved":
        return ScheduleInterleaved1F1B(stages, microbatches, **settings)
    if pipelining.kind == "zero_bubble":
        return ScheduleZBVZeroBubble(stages, microbatches, **settings)
    # With fewer micro-batches than stages the two orders are the same; torch has one of them.
    full = pipelining.kind == "1f1b" and microbatches >= ranks
    return (Schedule1F1B if full else ScheduleGPipe)(stages[0], microbatches, **settings)


class TimedStage(PipelineStage):
    """Counts the time that a stage works; waiting for others is the schedule's."""

    def __init__(self, stopwatch: Stopwatch, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._stopwatch = stopwatch

    def forward_one_chunk(self, *given: Any, **named: Any) -> Any:
        with self._stopwatch.running():
            return super().forward_one_chunk(*given, **named)

    def backward_one_chunk(self, *given: Any, **named: Any) -> Any:
        with self._stopwatch.running():
            return super().backward_one_chunk(*given, **named)

    def backward_weight_one_chunk(self, *given: Any, **named: Any) -> Any:
        with self._stopwatch.running():
            return super().backward_weight_one_chunk(*given, **named)
