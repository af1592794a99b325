"""The live view of a run, which becomes plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from shardtune.core.step import EvalResult, Reading, StepResult

PLAIN_LINES = 50  # lines that a whole run writes into a log, about


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
        left = f"{duration(reading.seconds_left)} left"
        if self._live is not None:
            self._live.show(done, numbers, left)
        elif done in (1, self.steps) or done % self._every == 0:
            self.say(f"step {done}/{self.steps}  {numbers}  {left}")

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


class _Live:
    """Two lines that stay at the bottom: how far it is, and how it goes. One would be too long."""

    def __init__(self, steps: int, console: Console) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]}"),
            expand=True,
        )
        self._task: TaskID = self._bar.add_task("", total=steps, left="starting")
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._numbers), console=console)
        self._live.start()

    def show(self, done: int, numbers: str, left: str) -> None:
        self._bar.update(self._task, completed=done, left=left)
        self._numbers.plain = numbers

    def stop(self) -> None:
        self._live.stop()


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
