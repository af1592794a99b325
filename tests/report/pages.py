"""Runs to draw, and a strict reader of the pages that are made of them."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from shardtune.core.runs.data_summary import DataSetSummary, DataSummary, DocumentExample, TextPiece
from shardtune.core.runs.run_history import RunHistory
from tests.jobs import make_environment
from tests.reports import evaluation_line, make_report, step_line

VOID = {"meta", "br"}


def make_history(path: Path = Path("runs/first"), *, steps: int = 80, **changes: Any) -> RunHistory:
    """A run that came to its end, but for what is given."""
    values: dict[str, Any] = {
        "state": "done",
        "job": {"model.name": "tiny", "train.steps": steps, "train.learning_rate": 1e-3},
        "steps": tuple(
            step_line(step, loss=1 + math.exp(-step / 20), utilisation=0.9)
            for step in range(1, steps + 1)
        ),
        "evaluations": {
            "code": tuple(evaluation_line(s, "code", 2 - s / steps) for s in (0, steps // 2, steps))
        },
        "report": make_report(directory=str(path)),
        "environment": make_environment(),
    }
    return RunHistory(path, **(values | changes))


def make_data(text: str = "Say it.") -> DataSummary:
    example = DocumentExample(
        name="code:0", tokens=9, labels=4,
        pieces=(
            TextPiece(text="<|user|>", trained=False, special=True),
            TextPiece(text=text, trained=True),
        ),
    )  # fmt: skip
    one = DataSetSummary(
        side="train", name="code", format="instruction", weight=1.0, rows=5, documents=4,
        tokens=400, labels=100, ends_trained=4, length_p50=90, length_p95=120, length_max=128,
        lengths=(0, 1, 3), truncated=1, truncated_tokens=7, split=0, too_long=0, untrained=1,
        unreadable=0, duplicates=2, notes=("a note",), examples=(example,),
    )  # fmt: skip
    return DataSummary(sequence_length=128, packing=True, fill=0.97, sets=(one,))


class PageReader(HTMLParser):
    """Reads a page, and refuses tags that aren't closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self, tag: str) -> list[str]:
        return [data for where, data in self.texts if where == tag]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)
