"""A job as a table: every value, and where it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardtune.config.job import Job
from shardtune.config.job_file import leaves
from shardtune.core.yaml_document import KeyPath, dotted


def print_job(
    job: Job,
    reasons: Mapping[KeyPath, str],
    origin: Callable[[KeyPath], str],
    console: Console | None = None,
    notes: Sequence[str] = (),
) -> None:
    """One line a value, the sections apart; then what a person should know besides."""
    console = console or Console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading, least in (("key", 32), ("value", 12), ("where it came from", 24)):
        table.add_column(heading, overflow="fold", min_width=least)  # wrapped, never cut off
    section: Any = None
    for path, value in leaves(job.model_dump(mode="json")):
        if section not in (None, path[0]):
            table.add_section()
        section = path[0]
        where = f"auto: {reasons[path]}" if path in reasons else origin(path)
        cells = (Text(cell) for cell in (dotted(path), _show(value), where))
        table.add_row(*cells, style="dim" if where == "default" else "")
    console.print(table)
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _show(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(str(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
