"""The end of a run, as a person wants to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardtune.report.terminal import duration


def print_summary(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints what `report.json` holds."""
    console = console or Console()
    for part in _answers(report["samples"]):
        console.print(part)
    console.print(_losses(report["evaluation"], report["training"]))
    console.print(_facts(report))


def _answers(samples: Sequence[Mapping[str, str]]) -> list[RenderableType]:
    """Each held-out prompt with the answers before and after."""
    panels: list[RenderableType] = []
    for number, sample in enumerate(samples, start=1):
        table = Table(box=None, show_header=True, expand=True, padding=(0, 1))
        table.add_column("before", ratio=1, style="dim")
        table.add_column("after", ratio=1)
        table.add_row(Text(sample["before"] or "(nothing)"), Text(sample["after"] or "(nothing)"))
        prompt = Text(sample["prompt"], style="bold")
        title = f"held-out prompt {number} of {len(samples)}"
        panels.append(Panel(Group(prompt, Text(), table), title=title, title_align="left"))
    return panels


def _losses(evaluation: Mapping[str, Any], training: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE, title="Loss per data set", title_justify="left")
    for heading in ("data set", "before", "after", "change", "perplexity", "token accuracy"):
        table.add_column(heading, justify="left" if heading == "data set" else "right")
    for name, result in evaluation.items():
        before, after = result["before"], result["after"]
        table.add_row(
            name,
            f"{before['loss']:.4f}",
            f"{after['loss']:.4f}",
            f"{after['loss'] / before['loss'] - 1:+.1%}",
            f"{before['perplexity']:.3g} -> {after['perplexity']:.3g}",
            f"{before['accuracy']:.1%} -> {after['accuracy']:.1%}",
        )
    if training["last_loss"] is not None:
        first, last = training["first_loss"], training["last_loss"]
        change = f"{last / first - 1:+.1%}"
        table.add_row("(training)", f"{first:.4f}", f"{last:.4f}", change, "", "", style="dim")
    return table


def _facts(report: Mapping[str, Any]) -> Table:
    training, result = report["training"], report["result"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    state = "done" if report["finished"] else "stopped early, on request"
    done = f"{state}: {training['step']} steps, {training['tokens']:,} tokens"
    grid.add_row("run", f"{done} in {duration(training['seconds'])} of training")
    grid.add_row("speed", f"{training['tokens_per_second']:,.0f} tokens/s over all ranks")
    memory = f"{training['peak_memory_gib']:.2f} GiB on the fullest of {report['ranks']} ranks"
    grid.add_row("peak memory", memory)
    checked = f"read back and compared: logits within {result['largest_difference']:.2g}"
    grid.add_row("result", f"{result['path']} ({result['kind']}; {checked})")
    grid.add_row("all files", report["directory"])
    directory = report["directory"]
    grid.add_row("next", f'shardtune generate {directory} --prompt "..."')
    if result["kind"] != "none":
        grid.add_row("", f"shardtune merge {directory} {directory}/merged")
    return grid
