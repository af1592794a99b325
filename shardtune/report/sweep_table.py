"""A sweep of forecasts as a table, and as data for `estimate --sweep --json`."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from shardtune.core.record import Record
from shardtune.core.units import GIB
from shardtune.plan.estimate.memory_band import Verdict
from shardtune.plan.sweep import Sweep, SweepPoint
from shardtune.report.plan_plots import classes_of


class SweptForecast(Record):
    """One point of a sweep. Figures are null where the job is refused."""

    values: dict[str, str]
    """Of the swept keys."""
    verdict: Verdict | None
    refused: str
    """Why it can't be had; empty where it can."""
    required_gib: float | None
    gpu_gib: dict[str, float]
    """By class."""
    tokens_per_second: float | None


class SweepResult(Record):
    """What `estimate --sweep --json` prints."""

    points: tuple[SweptForecast, ...]


def sweep_summary(swept: Sweep) -> SweepResult:
    return SweepResult(points=tuple(_summary(swept, each) for each in swept.points))


def _summary(swept: Sweep, point: SweepPoint) -> SweptForecast:
    found = point.found
    return SweptForecast(
        values={each.key: value for each, value in zip(swept.keys, point.values, strict=True)},
        verdict=None if found is None else found.verdict,
        refused=point.refused,
        required_gib=None if found is None else found.memory.required / GIB,
        gpu_gib={} if found is None else classes_of(found),
        tokens_per_second=None if found is None else found.speed.tokens_per_second,
    )


def print_sweep(swept: Sweep, console: Console | None = None) -> None:
    """A line for each point."""
    table = Table(box=box.SIMPLE_HEAD)
    for each in swept.keys:
        table.add_column(each.key.rpartition(".")[2], justify="right")
    for heading in ("GiB of", "checkpointing", "tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("verdict", no_wrap=True)
    for point in swept.points:
        found = point.found
        if found is None:
            table.add_row(*point.values, "", "", "", "refused", style="dim")
            continue
        table.add_row(
            *point.values,
            f"{found.memory.required / GIB:.1f} / {found.capacity / GIB:.0f}",
            found.checkpointing,
            f"{found.speed.tokens_per_second:,.0f}" if found.fits else "",
            found.verdict,
            style="" if found.fits else "dim",
        )
    console = console or Console()
    console.print(table)
    for why in dict.fromkeys(each.refused for each in swept.points if each.refused):
        console.print(f"refused: {why}", markup=False, highlight=False)
