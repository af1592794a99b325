"""Time left: what a run still has to do beside its steps, by what each took the last time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class TimeLeft:
    """Seconds of a run's other phases: loading the model, evaluating, answering prompts, tasks."""

    steps: int = 0
    every: int = 0
    """Steps between evaluations; 0 looks only before and after."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    """The same of each task."""
    took: dict[str, float] = field(default_factory=dict)
    """By phase."""
    run: float | None = None
    """Until the end of the run; None before the first step."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Remembers how long the block takes: `load`, `evaluate`, `answer` or the name of a task
        behind `task `."""
        begun = time.perf_counter()
        yield
        self.took[phase] = spent = time.perf_counter() - begun
        if self.run is not None:
            self.run = max(0.0, self.run - spent)

    def after(self, step: int, training: float) -> float:
        """Of the run, after this step: `training` for its other steps, and for what comes between
        and behind them. Reading the result back is loading the model once more."""
        beside = self._times(step, self.every) * self.took.get("evaluate", 0.0)
        beside += self.took.get("answer", 0.0) + self.took.get("load", 0.0)
        beside += sum(
            self._times(step, every) * self.took.get(f"task {name}", 0.0)
            for name, every in self.tasks.items()
        )
        self.run = training + beside
        return self.run

    def _times(self, step: int, every: int) -> int:
        """How often something is still due after this step, and once at the end. What is due in
        this step counts: it comes after the step is shown."""
        between = max(0, (self.steps - 1) // every - (step - 1) // every) if every else 0
        return between + 1
