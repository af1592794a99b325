"""What a run is about to do, before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardtune.config.job import Job
from shardtune.core.files.yaml_document import KeyPath, dotted
from shardtune.report.job_table import show_value

if TYPE_CHECKING:
    from shardtune.data.dataset import SourceReport


def print_opening(
    job: Job,
    reasons: Mapping[KeyPath, str],
    trained: Sequence[SourceReport],
    held_out: Sequence[SourceReport] = (),
    console: Console | None = None,
    notes: Sequence[str] = (),
) -> None:
    """The job in a few lines, the data in a table, every value that was chosen for it, and what a
    person should know besides."""
    console = console or Console()
    train = job.train
    length = f"{train.steps} step" if train.steps else f"{train.epochs:g} epoch"
    length += "s" * ((train.steps or train.epochs) != 1)
    rows = f"{train.global_batch} row{'s' * (train.global_batch > 1)}"
    processes = "process" if job.launch.processes == 1 else "processes"
    console.print(
        Text.assemble(
            (job.model.name, "bold"),
            f"  {job.trains}  {train.precision}  {length} of "
            f"{rows} x {job.data.sequence_length} tokens  "
            f"{job.strategy.type} on {job.launch.processes} {processes}",
        )
    )
    table = Table("data set", box=None, padding=(0, 2, 0, 0))
    for heading in ("documents", "tokens", "trained", "truncated", "left out", "unreadable"):
        table.add_column(heading, justify="right")
    sources = [(each.name, each) for each in trained]
    sources += [(f"{each.name} (eval)", each) for each in held_out]
    for name, source in sources:
        table.add_row(
            name,
            f"{source.documents:,}",
            f"{source.tokens:,}",
            f"{source.labels / max(1, source.tokens):.0%}",
            f"{source.truncated:,}",
            f"{source.dropped + source.untrained:,}",
            f"{source.bad:,}",
        )
    console.print(table)
    for name, source in sources:
        for note in source.notes:
            console.print(Text(f"{name}: {note}"))
    for path, reason in reasons.items():
        value = show_value(_at(job, path))
        console.print(Text(f"{dotted(path)} = {value}  ({reason})", style="dim"))
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _at(job: Job, path: KeyPath) -> object:
    value: object = job
    for part in path:
        value = value[part] if isinstance(part, int) else getattr(value, part)  # type: ignore[index]
    return value
