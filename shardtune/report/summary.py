"""The end of a run, as a person wants to read it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.runs.run_report import (
    BeforeAfter,
    Compared,
    ForecastCheck,
    RunReport,
    SampleAnswers,
    TaskReport,
    TrainingReport,
)
from shardtune.report.duration import duration

# A resumed run whose metrics were lost doesn't know where it began.
_UNKNOWN = EvalFigures(loss=None, perplexity=None, accuracy=None, labels=0)


def print_summary(report: RunReport, console: Console | None = None) -> None:
    """Prints what `report.json` holds."""
    console = console or Console()
    for part in _answers(report.samples):
        console.print(part)
    console.print(_losses(report.evaluation, report.training))
    if report.tasks:
        console.print(_tasks(report.tasks))
    console.print(_facts(report))


def _answers(samples: Sequence[SampleAnswers]) -> list[RenderableType]:
    """Each held-out prompt with the answers before and after."""
    panels: list[RenderableType] = []
    for number, sample in enumerate(samples, start=1):
        table = Table(box=None, show_header=True, expand=True, padding=(0, 1))
        table.add_column("before", ratio=1, style="dim")
        table.add_column("after", ratio=1)
        said = (_visible(text) or "(nothing)" for text in (sample.before, sample.after))
        table.add_row(*(Text(text) for text in said))
        prompt = Text(_visible(sample.prompt), style="bold")
        title = f"held-out prompt {number} of {len(samples)}"
        panels.append(Panel(Group(prompt, Text(), table), title=title, title_align="left"))
    return panels


def _visible(text: str) -> str:
    """A model may say anything, also what would steer a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _losses(evaluation: Mapping[str, BeforeAfter], training: TrainingReport) -> Table:
    table = Table(box=box.SIMPLE, title="Loss per data set", title_justify="left")
    for heading in ("data set", "before", "after", "change", "perplexity", "token accuracy"):
        table.add_column(heading, justify="left" if heading == "data set" else "right")
    for name, result in evaluation.items():
        before, after = result.before or _UNKNOWN, result.after
        table.add_row(
            name,
            *_fall(before.loss, after.loss),
            f"{_number(before.perplexity):.3g} -> {_number(after.perplexity):.3g}",
            f"{_number(before.accuracy):.1%} -> {_number(after.accuracy):.1%}",
        )
    if training.last_loss is not None:  # a resumed run may have had no step left to do
        fall = _fall(training.first_loss, training.last_loss)
        table.add_row("(training)", *fall, "", "", style="dim")
    return table


def _tasks(tasks: Mapping[str, TaskReport]) -> Table:
    table = Table(box=box.SIMPLE, title="Score per task", title_justify="left")
    for heading in ("task", "metric", "before", "after", "95 % interval", "rows", "cost"):
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
    for name, found in tasks.items():
        after = found.after
        table.add_row(
            Text(name),
            after.metric,
            f"{found.before.score:.1%}" if found.before else "",
            f"{after.score:.1%}",
            f"{after.low:.1%} to {after.high:.1%}",
            str(after.rows),
            f"{found.seconds:.1f} s",
        )
    return table


def _number(value: float | None) -> float:
    """JSON knows no NaN: null stands for it."""
    return math.nan if value is None else value


def _fall(first: float | None, last: float | None) -> tuple[str, str, str]:
    before, after = _number(first), _number(last)
    return f"{before:.4f}", f"{after:.4f}", f"{after / before - 1:+.1%}" if before else ""


def _facts(report: RunReport) -> Table:
    training, result = report.training, report.result
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("run", _state(report))
    if training.skipped:
        grid.add_row("skipped", f"{training.skipped} updates whose gradient was not finite")
    if training.tokens_per_second:
        grid.add_row("speed", f"{training.tokens_per_second:,.0f} tokens/s over all ranks")
    if training.utilisation is not None:
        busy = f"{100 * training.utilisation:.0f} %"
        what = "not waiting for other ranks" if report.ranks > 1 else "computing"
        grid.add_row("", f"busy {busy} ({what})")
    fullest = f" on the fullest of {report.ranks} ranks" if report.ranks > 1 else ""
    memory = f"{training.peak_memory_gib:.2f} GiB{fullest}"
    grid.add_row("peak memory", memory)
    for number, line in enumerate(_compared(report.forecast)):
        grid.add_row("" if number else "forecast", line)
    grid.add_row("result", Text(f"{result.path} ({result.kind})"))
    if (best := report.best) is not None:
        of = result.step if result.step is not None else training.step
        lost = "" if of == best.step else f"; its checkpoint is lost, the result is of step {of}"
        grid.add_row("", f"best {best.metric}: {best.value:.6g}, after step {best.step}{lost}")
    logits = f"logits within {_number(result.largest_difference):.2g}"
    grid.add_row("", f"read back: weights as they were written, {logits}")
    grid.add_row("all files", Text(report.directory))
    grid.add_row("", Text(f"as a page: {report.directory}/report.html"))
    for number, command in enumerate(_next(report)):
        grid.add_row("" if number else "next", Text(command))
    return grid


_STATES = {"params": "weights", "grads": "gradients", "optim": "optimizer states"}


def _compared(found: ForecastCheck | None) -> list[str]:
    """Predicted beside measured, with the error."""
    if found is None:
        return []
    held: dict[str, Compared] = dict(found.held_bytes)
    off = [
        f"{_STATES[state]} {_size(pair.predicted)} predicted, {_size(pair.measured)} held"
        for state, pair in held.items()
        if pair.predicted != pair.measured
    ]
    total = _size(sum(pair.measured for pair in held.values()))
    exact = "" if off else ", exactly as predicted"
    lines = [f"a rank holds {total} between steps{exact}", *off]
    for pair, form, what in (
        (found.peak_gib, "{:.2f}", "GiB at the peak"),
        (found.tokens_per_second, "{:,.0f}", "tokens/s"),
    ):
        if pair is not None:
            predicted, measured = form.format(pair.predicted), form.format(pair.measured)
            error = f"{_number(pair.error):+.1%}"
            lines.append(f"{predicted} {what} predicted, {measured} measured ({error})")
    return lines


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"


def _state(report: RunReport) -> str:
    training = report.training
    state = "done" if report.finished else "stopped early, on request"
    if (stop := report.early_stop) is not None:
        state = f"done early ({stop.metric} has not improved in {stop.waited} evaluations)"
    done = f"{state}: {training.step} steps, {training.tokens:,} tokens"
    return f"{done} in {duration(training.seconds)} of training"


def _next(report: RunReport) -> list[str]:
    """Commands that make sense now, to be copied."""
    directory = report.directory
    quoted = shlex.quote(directory)
    commands = [f'shardtune generate {quoted} --prompt "..."']
    if report.result.kind != "full fine-tune":
        commands.append(f"shardtune merge {quoted} {shlex.quote(directory + '/merged')}")
    if not report.finished:
        commands.insert(0, f"shardtune train {shlex.quote(directory + '/job.yaml')} --resume")
    return commands
