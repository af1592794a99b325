"""The learning rate as a pure function of the step, so that a resumed run can't drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # importing pydantic would make `shardtune --help` wait
    from shardtune.core.lr_one_cycle import OneCycle

ScheduleKind = Literal["cosine", "linear", "constant", "one_cycle"]


@dataclass(frozen=True)
class Schedule:
    """Linear warmup from zero, then the named decay to zero at `steps`; or one cycle.

    The same curves as Hugging Face's `get_*_schedule_with_warmup` and torch's `OneCycleLR`, so that
    a job moved from there keeps its learning rates.
    """

    kind: ScheduleKind
    peak: float
    warmup_steps: int
    steps: int
    cycle: OneCycle | None = None
    """Of `one_cycle`, which has a warmup of its own."""
    start: int = 0
    """The step in which it begins; `steps` are those from there on."""

    def at(self, step: int) -> float:
        """The rate that the optimizer uses in step `step`, counted from 0."""
        step = max(0, step - self.start)
        if self.kind == "one_cycle":
            assert self.cycle is not None
            return self._in_cycle(self.cycle, step)
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - done)
        return self.peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))

    def _in_cycle(self, cycle: OneCycle, step: int) -> float:
        """torch counts phases in fractions of steps, so that the peak may lie between two."""
        first = self.peak / cycle.div_factor
        last = first / cycle.final_div_factor
        turn, end = cycle.pct_start * self.steps - 1, self.steps - 1
        if step >= end:
            return last if turn < end else self.peak
        if step <= turn:
            return _cosine(first, self.peak, step / turn if turn else 1.0)
        return _cosine(self.peak, last, (step - turn) / (end - turn))


def _cosine(start: float, end: float, done: float) -> float:
    """Half a cosine from `start` to `end`, of which a share is done."""
    return end + (start - end) / 2.0 * (1.0 + math.cos(math.pi * done))
