"""Shows what `shardtune verify` has found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardtune.core.units import MIB

if TYPE_CHECKING:
    from shardtune.checkpoint.verify import Verification


def print_verdicts(verdicts: Iterable[Verification], console: Console | None = None) -> None:
    """One line for each checkpoint and the result, and one for each fault."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("what", no_wrap=True)
    table.add_column("written by")
    for heading in ("files", "MiB"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    for each in verdicts:
        state = Text("every byte as written", "green")
        if each.faults:
            state = Text("\n".join(each.faults), "red")
        size = f"{each.bytes / MIB:,.1f}" if each.files else ""
        files = str(each.files) if each.files else ""
        table.add_row(Text(each.name), each.written_by, files, size, state)
    (console or Console()).print(table)
