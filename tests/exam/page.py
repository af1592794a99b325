"""Puts the exam's table into docs/faults.md, between two marks."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

import torch

from tests.exam.case import Verdict
from tests.exam.harness import ROOT
from tests.exam.table import Row, count

PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- exam: begin -->", "<!-- exam: end -->"


def write(
    rows: Sequence[Row],
    verdicts: Mapping[int, Verdict],
    theirs: Mapping[int, Verdict],
    minutes: float,
) -> None:
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = render(rows, verdicts, theirs, minutes)
    PAGE.write_text(f"{before}{BEGIN}\n{made}{END}{after}", "utf-8")


def render(
    rows: Sequence[Row],
    verdicts: Mapping[int, Verdict],
    theirs: Mapping[int, Verdict],
    minutes: float,
) -> str:
    """The table as Markdown, under a line that says how it was made."""
    held = ", ".join(
        f"{good} of {applying} {priority} cases that apply are held"
        for priority in ("P0", "P1")
        for good, applying in [count(rows, verdicts, priority)]
    )
    lines = [
        f"Made by `python -m tests.exam --docs` in {minutes:.0f} minutes on {os.cpu_count()} cores "
        f"({platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}): "
        f"{held}.",
        "",
        "| case | | what is done | held | figure | Hugging Face's Trainer |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict, other = verdicts[row.number], theirs.get(row.number)
        cells = (
            str(row.number),
            row.priority,
            row.title,
            verdict.outcome,
            verdict.figure,
            str(other or ""),
        )
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
