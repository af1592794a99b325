"""The panel of a running run: the few lines that stay at the bottom of a terminal or in a notebook.

Each line is cut to the width that there is, which may be 80 columns; nothing is ever wrapped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.report.duration import duration

TREND_STEPS = 200
"""Steps over which the loss is drawn, and its trend is told."""
CURVE_WIDTH = 16
MOST_SETS, MOST_WARNINGS = 4, 3
"""Lines that held-out sets and warnings take at most."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class StepForecastLine:
    """What was predicted, to stand beside what is measured."""

    tokens_per_second: float | None = None
    memory_gib: float | None = None


@dataclass(frozen=True)
class StepNumbers:
    """The figures of a step that a person watches."""

    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    memory_gib: float
    utilisation: float | None


class RunPanel:
    """Progress bar and time left, loss with its trend, speed and memory beside their forecast,
    held-out sets before and now, and warnings, which stay."""

    def __init__(self, steps: int, forecast: StepForecastLine | None = None) -> None:
        self.steps = steps
        self.forecast = forecast or StepForecastLine()
        self.done = 0
        self.doing = "starting"
        """What is done beside steps; empty in a step."""
        self.over = False
        """Whether it shows how a run has ended."""
        self._until: float | None = None
        self._numbers: StepNumbers | None = None
        self._losses: deque[float] = deque(maxlen=TREND_STEPS)
        self._sets: dict[str, tuple[EvalFigures, EvalFigures]] = {}
        self._warnings: deque[str] = deque(maxlen=MOST_WARNINGS)
        self._warned = 0

    def step(self, done: int, numbers: StepNumbers, seconds_left: float) -> None:
        self.done, self.doing, self._numbers = done, "", numbers
        self._until = time.monotonic() + seconds_left
        if math.isfinite(numbers.loss):
            self._losses.append(numbers.loss)

    def phase(self, doing: str, seconds_left: float | None) -> None:
        """Something beside the steps."""
        self.doing = doing
        self._until = None if seconds_left is None else time.monotonic() + seconds_left

    def evaluation(self, name: str, figures: EvalFigures) -> None:
        before, _ = self._sets.get(name, (figures, figures))
        self._sets[name] = before, figures

    def warn(self, text: str) -> None:
        self._warnings.append(text.splitlines()[0] if text else "")
        self._warned += 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width):
            line.truncate(options.max_width, overflow="ellipsis")
            line.no_wrap = True
            yield line

    def lines(self, width: int) -> Iterator[Text]:
        """As they are shown, the most important first."""
        yield self._bar(width)
        if self.doing and not self.over:
            yield Text(self.doing, "cyan")
        if self._numbers is not None:
            yield self._learning(self._numbers)
            yield self._speed(self._numbers)
        yield from self._held_out()
        yield from self._kept_warnings()

    def _bar(self, width: int) -> Text:
        left = "starting"
        if self._until is not None:
            left = f"{duration(max(0.0, self._until - time.monotonic()))} left"
        head, share, tail = f"step {self.done} ", 0.0, ""
        if self.steps:  # which only the data may tell
            share = self.done / self.steps
            head, tail = f"step {self.done}/{self.steps} ", f" {share:.0%} "
        tail += "" if self.over else f" {left}"
        room = max(4, width - len(head) - len(tail))
        full = round(share * room)
        return Text.assemble(head, ("━" * full, "green"), ("━" * (room - full), "dim"), tail)

    def _learning(self, found: StepNumbers) -> Text:
        words = f"  lr {found.learning_rate:.2e}  grad {found.grad_norm:.3g}"
        curve = "".join(_curve(self._losses, CURVE_WIDTH))
        told = trend(self._losses)
        return Text.assemble(
            f"loss {found.loss:.4f} ", (curve, "cyan"), f" {told}" if told else "", words
        )

    def _speed(self, found: StepNumbers) -> Text:
        speed, memory = self.forecast.tokens_per_second, self.forecast.memory_gib
        words = f"{found.tokens_per_second:,.0f} tok/s"
        words += f" (forecast {speed:,.0f})" if speed is not None else ""
        words += f"  {found.memory_gib:.2f} GiB"
        words += f" (forecast {memory:.2f})" if memory is not None else ""
        if found.utilisation is not None:
            words += f"  {found.utilisation:.0%} busy"
        return Text(words)

    def _held_out(self) -> Iterator[Text]:
        for name, (before, now) in list(self._sets.items())[:MOST_SETS]:
            if now.loss is None:
                yield Text(f"{name}: the loss is not finite", "yellow")
                continue
            was = f" (before: {before.loss:.4f})" if before.loss is not None else ""
            right = f"  accuracy {now.accuracy:.1%}" if now.accuracy is not None else ""
            yield Text(f"{name}: loss {now.loss:.4f}{was if before is not now else ''}{right}")
        if len(self._sets) > MOST_SETS:
            yield Text(f"and {len(self._sets) - MOST_SETS} more sets", "dim")

    def _kept_warnings(self) -> Iterator[Text]:
        hidden = self._warned - len(self._warnings)
        if hidden:
            yield Text(f"{hidden} earlier warning{'s' * (hidden > 1)} above", "yellow")
        for text in list(self._warnings):  # the training thread appends to it
            yield Text(f"! {text}", "yellow")


def trend(losses: Iterable[float]) -> str:
    """Where the loss is going: the mean of the later half of the steps against the earlier's."""
    found = list(losses)
    half = len(found) // 2
    if half < 4:
        return ""
    early, late = sum(found[:half]) / half, sum(found[-half:]) / half
    change = late / early - 1 if early > 0 else 0.0
    if abs(change) < 0.005:
        return "steady"
    return f"{'falling' if change < 0 else 'rising'} {abs(change):.1%}"


def _curve(losses: Iterable[float], width: int) -> Iterator[str]:
    """One block a stretch of steps, as high as its mean loss."""
    found = list(losses)
    if len(found) < 2:
        return
    count = min(width, len(found))
    edges = [round(index * len(found) / count) for index in range(count + 1)]
    means = [sum(found[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    for mean in means:
        share = (mean - low) / (high - low) if high > low else 0.5
        yield _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]
