"""The schedules of `torch.distributed.pipelining`, by our names, with a clock on their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from shardtune.core.host.heartbeat import Heartbeat, Phase
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.engine.timer import ComputeTimer


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
    """Counts the time that a stage works on micro-batches of `shape`, and tells it to the watcher;
    waiting for others is the schedule's."""

    def __init__(
        self,
        timer: ComputeTimer,
        heartbeat: Heartbeat,
        shape: tuple[int, int],
        *given: Any,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._timer, self._heartbeat, self._shape = timer, heartbeat, shape

    def forward_one_chunk(self, *given: Any, **named: Any) -> Any:
        with self._working("forward"):
            return super().forward_one_chunk(*given, **named)

    def backward_one_chunk(self, *given: Any, **named: Any) -> Any:
        with self._working("backward"):
            return super().backward_one_chunk(*given, **named)

    def backward_weight_one_chunk(self, *given: Any, **named: Any) -> Any:
        with self._working("backward"):
            return super().backward_weight_one_chunk(*given, **named)

    @contextmanager
    def _working(self, phase: Phase) -> Iterator[None]:
        if phase == "forward":
            self._heartbeat.forward(*self._shape)
        else:
            self._heartbeat.enter(phase)
        with self._timer.running():
            yield
        self._heartbeat.enter("collective")
