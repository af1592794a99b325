"""Time left: what a run still has to do beside its steps, by what each took the last time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

TimedPhase = Literal["load", "evaluate", "answer"]


@dataclass
class TimeLeft:
    """Seconds of a run's other phases: loading the model, evaluating, answering prompts."""

    steps: int = 0
    every: int = 0
    """Steps between evaluations; 0 looks only before and after."""
    took: dict[TimedPhase, float] = field(default_factory=dict)
    run: float | None = None
    """Until the end of the run; None before the first step."""

    @contextmanager
    def timed(self, phase: TimedPhase) -> Iterator[None]:
        """Remembers how long the block takes."""
        begun = time.perf_counter()
        yield
        self.took[phase] = spent = time.perf_counter() - begun
        if self.run is not None:
            self.run = max(0.0, self.run - spent)

    def after(self, step: int, training: float) -> float:
        """Of the run, after this step: `training` for its other steps, and for what comes between
        and behind them. Reading the result back is loading the model once more."""
        evaluations = 1
        if self.every:  # of this step, too: it is evaluated after it is shown
            evaluations += max(0, (self.steps - 1) // self.every - (step - 1) // self.every)
        beside = evaluations * self.took.get("evaluate", 0.0)
        beside += self.took.get("answer", 0.0) + self.took.get("load", 0.0)
        self.run = training + beside
        return self.run
