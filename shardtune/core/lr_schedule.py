"""The learning rate as a pure function of the step, so that a resumed run can't drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Schedule:
    """Linear warmup from zero, then the named decay to zero at `steps`.

    The same curves as Hugging Face's `get_*_schedule_with_warmup`, so that a job moved from there
    keeps its learning rates.
    """

    kind: ScheduleKind
    peak: float
    warmup_steps: int
    steps: int

    def at(self, step: int) -> float:
        """The rate that the optimizer uses in step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - done)
        return self.peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
