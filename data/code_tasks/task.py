"""A task template: what is asked, the code that answers it, and how that code is tested."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

Case = dict[str, str]

_HOLE = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Task:
    """One template. Its text blocks hold `{{column}}` holes that each case fills.

    A template is written as text, not as Python values, because everything in it ends up as
    text: a block is dedented, and a table's columns are separated by two or more spaces.
    """

    name: str
    asks: str
    """One wording per line. A line that starts in lower case is a goal and is put into one of
    the sentences of wording.py; a line that starts with a capital is used as it stands."""
    cases: str
    """A table: the column names, then one line for each variant of the task."""
    code: str
    """The answer."""
    example: str = ""
    """A test that is short enough to be shown in a prompt."""
    tests: str = ""
    """More tests, one expression per line; each must be true."""
    hint: str = ""
    """What a prompt may show in place of the example."""
    tables: str = ""
    """The SQL tables that every prompt of the task describes."""
    kind: str = "python"
    held_out: bool = False
    """Its rows go to the held-out file only."""

    def table(self) -> list[Case]:
        header, *rows = (re.split(r"\s{2,}", line) for line in lines(self.cases))
        for row in rows:
            if len(row) != len(header):
                raise ValueError(
                    f"{self.name}: {len(header)} columns, but {len(row)} cells in {row}"
                )
        return [dict(zip(header, row, strict=True)) for row in rows]

    def answer(self, case: Case) -> str:
        return fill(inspect.cleandoc(self.code), case)

    def proofs(self, case: Case) -> list[str]:
        return [fill(line, case) for line in (*lines(self.example), *lines(self.tests))]


def lines(block: str) -> list[str]:
    return [line.strip() for line in block.splitlines() if line.strip()]


def fill(text: str, case: Case) -> str:
    """Fill the holes; `{{Do}}` is column `do` with a capital.

    A hole without a column is a mistake in the template, hence the KeyError.
    """

    def value(hole: re.Match[str]) -> str:
        column = hole[1]
        text = case[column.lower()]
        return text[0].upper() + text[1:] if column[0].isupper() else text

    return _HOLE.sub(value, text)
