"""The doctor's findings as a person reads them: one sentence each, and the fix below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.text import Text

_MARKS = {"good": ("ok  ", "green"), "warning": ("look", "yellow"), "bad": ("bad ", "red")}


class Said(Protocol):
    """A finding, by whoever made it."""

    @property
    def level(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def fact(self) -> str: ...
    @property
    def fix(self) -> str: ...


def print_findings(found: Sequence[Said], console: Console | None = None) -> None:
    """All of them, and how many are not good."""
    console = console or Console(soft_wrap=True)
    for each in found:
        mark, style = _MARKS[each.level]
        line = Text.assemble((mark, style), f"  {each.place}: {each.fact}")
        console.print(line)
        if each.fix:
            console.print(Text(f"      fix: {each.fix}"))
    bad = sum(each.level == "bad" for each in found)
    warnings = sum(each.level == "warning" for each in found)
    console.print(f"{bad} bad, {warnings} to look at, {len(found) - bad - warnings} good")
