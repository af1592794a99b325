"""Writes a benchmark's table where the docs show it, with the command that made it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines in Markdown, and an empty one."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def write_table(
    name: str,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str,
    *,
    command: str = "",
    machine: str = "",
    folder: Path = DOCS,
    shown: bool = True,
) -> None:
    """Writes the table to docs/benchmarks/NAME.md, or to another folder, and prints it if it is to
    be `shown`.

    `command` is what stood behind `python -m benchmarks.`, if more than NAME; `machine` says where
    the figures come from, if not from here.
    """
    lines = table(headings, rows) if rows else [""]
    made = f"Made by `python -m benchmarks.{command or name}` {machine or here()}."
    text = "\n".join([f"# {title}", "", made, "", *lines, note, ""])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    if shown:
        print(text)


def here() -> str:
    """What Python, torch and machine this is."""
    import torch

    gpu = f" and an {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"with Python {platform.python_version()} and torch {torch.__version__} on "
        f"{platform.machine()}{gpu}, {torch.get_num_threads()} threads"
    )
