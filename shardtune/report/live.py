"""The live view of a run, which becomes plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from rich.console import Console
from rich.live import Live

from shardtune.core.runs.run_report import TaskFigures
from shardtune.core.step import EvalResult, Reading, StepResult
from shardtune.report.duration import duration
from shardtune.report.run_panel import RunPanel, StepForecastLine, StepNumbers

PLAIN_LINES = 50  # lines that the steps of a run write into a log, about
PLAIN_SECONDS = 3.0  # between two lines of steps, at least
PHASE_SECONDS = 10.0  # between two lines of what takes long beside them
REDRAWN = 1.0  # times a second: each takes a millisecond from the thread that trains


class RunView:
    """Shows step, loss, rate, gradient norm, speed, memory and time left."""

    def __init__(
        self,
        steps: int,
        *,
        shown: bool = True,
        quiet: bool = False,
        console: Console | None = None,
        forecast: StepForecastLine | None = None,
    ) -> None:
        """`quiet` leaves only warnings; not even they are `shown` by most ranks."""
        self.steps = steps
        self.console = console or Console(quiet=not shown)
        self._quiet = quiet
        self._panel = RunPanel(steps, forecast)
        self._live: Live | None = None
        self._every = max(1, steps // PLAIN_LINES)
        self._told = -PLAIN_SECONDS

    def __enter__(self) -> RunView:
        if self.console.is_terminal and not self.console.quiet and not self._quiet:
            self._live = Live(self._panel, console=self.console, refresh_per_second=REDRAWN)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._panel.over = error is None
            with suppress(OSError):
                self._live.stop()

    def step(self, done: int, result: StepResult, reading: Reading) -> None:
        """After each step; `done` counts it."""
        numbers = StepNumbers(
            result.loss,
            result.learning_rate,
            result.grad_norm,
            reading.tokens_per_second,
            reading.memory_gib,
            reading.utilisation,
        )
        if self._live is not None:
            self._panel.step(done, numbers, reading.seconds_left)
        elif self._is_due(done):
            left = f"{duration(reading.seconds_left)} left"
            self.say(f"step {done}/{self.steps}  {_in_a_line(numbers)}  {left}")

    def _is_due(self, done: int) -> bool:
        """Whether this step gets a line in a log: the first, the last, and some between."""
        now, ends = time.monotonic(), done in (1, self.steps)
        due = ends or (done % self._every == 0 and now - self._told >= PLAIN_SECONDS)
        if due:
            self._told = now
        return due

    @contextmanager
    def phase(self, doing: str, run_left: float | None = None) -> Iterator[PhaseProgress]:
        """What takes time beside the steps: shows it, and the time left until the run's end where
        `run_left` tells, else until its own. Tell what is given how far it is."""
        begun = shown = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            own = (now - begun) * (total - done) / done if done else None
            run = _minus(run_left, now - begun)
            left = own if run is None else max(run, own or 0.0)
            words = f"{doing}: {done} of {total}" if total else doing
            in_words = f"{words}, {duration(left)} left" if left is not None else words
            if self._live is not None:  # where nothing tells when the run ends, the bar doesn't
                self._panel.phase(in_words if run is None else words, None if run is None else left)
            elif done and now - shown >= PHASE_SECONDS:
                shown = now
                self.say(in_words)

        progress(0, 0)
        yield progress

    def evaluation(self, done: int, results: Iterable[EvalResult]) -> None:
        """One line a held-out set; the latest stay in sight."""
        for result in results:
            self._panel.evaluation(result.name, result.summary())
            self.say(
                f"after step {done}  {result.name}: loss {result.loss:.4f}  "
                f"perplexity {result.perplexity:.3g}  accuracy {result.accuracy:.1%}",
                "cyan",
            )

    def task(self, done: int, name: str, found: TaskFigures) -> None:
        """One line a task, with what it cost."""
        said = f"{found.metric} {found.score:.1%} ({found.low:.1%} to {found.high:.1%})"
        cost = f"{found.rows} row{'s' * (found.rows > 1)} in {found.seconds:.1f} s"
        self.say(f"after step {done}  {name}: {said}  {cost}", "cyan")

    def warn(self, text: str, style: str = "yellow") -> None:
        """Something that a person should know: it stays in sight, and `--quiet` doesn't hide it."""
        self._panel.warn(text)
        self._print(text, style)

    def say(self, text: str, style: str = "") -> None:
        """A line above the live part. It may hold names of files, so it is no markup."""
        if not self._quiet:
            self._print(text, style)

    def _print(self, text: str, style: str) -> None:
        # A terminal that was closed is no reason to lose a step: the metrics have it all.
        with suppress(OSError):
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


PhaseProgress = Callable[[int, int], None]
"""Told how many pieces of a phase are done, and of how many."""


def _minus(left: float | None, spent: float) -> float | None:
    return None if left is None else max(0.0, left - spent)


def _in_a_line(found: StepNumbers) -> str:
    numbers = (
        f"loss {found.loss:.4f}  lr {found.learning_rate:.2e}  grad {found.grad_norm:.3g}  "
        f"{found.tokens_per_second:,.0f} tok/s  {found.memory_gib:.2f} GiB"
    )
    if found.utilisation is not None:
        numbers += f"  {found.utilisation:.0%} busy"
    return numbers
