"""A job as a table: every value, and where it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text

from shardtune.config.job import Job
from shardtune.config.job_file import leaves
from shardtune.core.files.yaml_document import KeyPath, dotted

HEADINGS = ("key", "value", "where it came from")
KEY, VALUE = 34, 16
"""Columns of a terminal of 80. A longer key or value has a line of its own, so the third column
always has room for a file and a line. A wider terminal has wider keys."""
GAP = "  "


def print_job(
    job: Job,
    reasons: Mapping[KeyPath, str],
    origin: Callable[[KeyPath], str],
    console: Console | None = None,
    notes: Sequence[str] = (),
) -> None:
    """One line a value, the sections apart; then what a person should know besides."""
    console = console or Console()
    rows = []
    for path, value in leaves(job.model_dump(mode="json")):
        where = f"auto: {reasons[path]}" if path in reasons else origin(path)
        rows.append((path[0], dotted(path), show_value(value), where))
    key = min(max(KEY, console.width - 80 + KEY), max(len(row[1]) for row in rows))
    widths = key, VALUE, max(len(HEADINGS[2]), console.width - key - VALUE - 2 * len(GAP))
    _print_row(console, HEADINGS, widths, "bold")
    section: Any = None
    for own, *cells in rows:
        if section not in (None, own):
            console.print()
        section = own
        _print_row(console, cells, widths, "dim" if cells[2] == "default" else "")
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _print_row(
    console: Console, cells: Sequence[str], widths: tuple[int, int, int], style: str
) -> None:
    for line in _lines(cells, widths):
        console.print(Text(line.rstrip(), style, no_wrap=True), soft_wrap=True)


def _lines(cells: Sequence[str], widths: tuple[int, int, int]) -> Iterator[str]:
    """A row as lines, none cut off."""
    key, value, where = cells
    if len(key) > widths[0]:
        yield key
        key = ""
    if len(value) > widths[1]:
        for part in _wrapped(value, widths[1] + len(GAP) + widths[2]):
            yield f"{key.ljust(widths[0])}{GAP}{part}"
            key = value = ""
    for parts in zip_longest([key], [value], _wrapped(where, widths[2]), fillvalue=""):
        padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
        yield GAP.join(padded)


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, width, break_on_hyphens=False) or [""]


def show_value(value: Any) -> str:
    """A value as the job file has it."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(str(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
