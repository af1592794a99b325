"""The live view of a run, which becomes plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.text import Text

from shardtune.core.step import EvalResult, Reading, StepResult

PLAIN_LINES = 50  # lines that the steps of a run write into a log, about
PLAIN_SECONDS = 10.0  # between two lines of what takes long beside them


class RunView:
    """Shows step, loss, rate, gradient norm, speed, memory and time left."""

    def __init__(self, steps: int, *, shown: bool = True, console: Console | None = None) -> None:
        self.steps = steps
        self.console = console or Console(quiet=not shown)
        self._live: _Live | None = None
        self._every = max(1, steps // PLAIN_LINES)

    def __enter__(self) -> RunView:
        if self.console.is_terminal and not self.console.quiet:
            self._live = _Live(self.steps, self.console)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def step(self, done: int, result: StepResult, reading: Reading) -> None:
        """After each step; `done` counts it."""
        numbers = (
            f"loss {result.loss:.4f}  lr {result.learning_rate:.2e}  grad {result.grad_norm:.3g}  "
            f"{reading.tokens_per_second:,.0f} tok/s  {reading.memory_gib:.2f} GiB"
        )
        if reading.utilisation is not None:
            numbers += f"  {reading.utilisation:.0%} busy"
        if self._live is not None:
            self._live.show(numbers, reading.seconds_left, done)
        elif done in (1, self.steps) or done % self._every == 0:
            left = f"{duration(reading.seconds_left)} left"
            self.say(f"step {done}/{self.steps}  {numbers}  {left}")

    @contextmanager
    def phase(self, doing: str, run_left: float | None = None) -> Iterator[PhaseProgress]:
        """What takes time beside the steps: shows it, and the time left until the run's end where
        `run_left` tells, else until its own. Tell what is given how far it is."""
        begun = shown = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            own = (now - begun) * (total - done) / done if done else None
            known = [left for left in (own, _minus(run_left, now - begun)) if left is not None]
            words = f"{doing}: {done} of {total}" if total else doing
            if self._live is not None:
                self._live.show(words, max(known) if known else None)
            elif done and now - shown >= PLAIN_SECONDS:
                shown = now
                self.say(f"{words}, {duration(max(known))} left" if known else words)

        progress(0, 0)
        yield progress

    def evaluation(self, done: int, results: Iterable[EvalResult]) -> None:
        """One line a held-out set."""
        for result in results:
            self.say(
                f"after step {done}  {result.name}: loss {result.loss:.4f}  "
                f"perplexity {result.perplexity:.3g}  accuracy {result.accuracy:.1%}",
                "cyan",
            )

    def say(self, text: str, style: str = "") -> None:
        """A line above the live part. It may hold names of files, so it is no markup."""
        # A terminal that was closed is no reason to lose a step: the metrics have it all.
        with suppress(OSError):
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


PhaseProgress = Callable[[int, int], None]
"""Told how many pieces of a phase are done, and of how many."""


def _minus(left: float | None, spent: float) -> float | None:
    return None if left is None else max(0.0, left - spent)


class _Live:
    """Two lines that stay at the bottom: how far it is, and how it goes. One would be too long."""

    def __init__(self, steps: int, console: Console) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            _LeftColumn(),
            expand=True,
        )
        self._task: TaskID = self._bar.add_task("", total=steps, until=None)
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._numbers), console=console)
        self._live.start()

    def show(self, words: str, seconds_left: float | None, done: int | None = None) -> None:
        until = None if seconds_left is None else time.monotonic() + seconds_left
        self._bar.update(self._task, completed=done, until=until)
        self._numbers.plain = words

    def stop(self) -> None:
        self._live.stop()


class _LeftColumn(ProgressColumn):
    """The time left, which goes on falling while a step or a phase takes its time."""

    def render(self, task: Task) -> Text:
        until: float | None = task.fields["until"]
        if until is None:
            return Text("starting")
        return Text(f"{duration(max(0.0, until - time.monotonic()))} left")


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
