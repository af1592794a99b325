"""Shows what `shardtune verify` has found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MIB = 1 << 20


def print_verdicts(verdicts: Iterable[Mapping[str, Any]], console: Console | None = None) -> None:
    """One line for each checkpoint and the result, and one for each fault."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("what", no_wrap=True)
    table.add_column("written by")
    for heading in ("files", "MiB"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    for each in verdicts:
        wrong = each["faults"]
        state = Text("\n".join(wrong), "red") if wrong else Text("every byte as written", "green")
        size = f"{each['bytes'] / MIB:,.1f}" if each["files"] else ""
        files = str(each["files"]) if each["files"] else ""
        table.add_row(Text(each["name"]), each["written_by"], files, size, state)
    (console or Console()).print(table)
