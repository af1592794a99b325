"""Exams whose cases have names: each case is tried, and becomes a row of a table."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console
from rich.table import Table

from tests.exam.case import Findings, Verdict

Lab = TypeVar("Lab")


@dataclass(frozen=True)
class NamedCase(Generic[Lab]):
    """One row of the table: a function that gets the lab and says what it saw."""

    name: str
    title: str
    check: Callable[[Lab, Findings], None]

    def sit(self, lab: Lab) -> Verdict:
        """Tries it. What it raises is what doesn't hold."""
        findings = Findings()
        try:
            self.check(lab, findings)
        except Exception as error:
            traceback.print_exc()
            return Verdict("not held", f"{type(error).__name__}: {error}")
        return findings.verdict()


def exam_arguments(doc: str | None) -> argparse.ArgumentParser:
    """What every such exam can be told."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave run and files there")
    return parser


def sit_cases(cases: Sequence[NamedCase[Lab]], lab: Lab, only: Sequence[str] | None) -> int:
    """Tries the cases whose names begin with one of `only`, prints the table, and returns the exit
    code."""
    chosen = [case for case in cases if case.name.startswith(tuple(only or ("",)))]
    table = Table("case", "outcome", "seconds", "what was seen")
    held = 0
    for case in chosen:
        begun = time.monotonic()
        verdict = case.sit(lab)
        seconds = f"{time.monotonic() - begun:.0f}"
        told = f"{case.name}: {verdict.outcome}, {seconds} s: {verdict.figure}"
        print(told, file=sys.stderr, flush=True)  # a table that never comes tells nothing
        held += verdict.outcome != "not held"
        table.add_row(f"{case.name}: {case.title}", verdict.outcome, seconds, verdict.figure)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{held} of {len(chosen)} cases held")
    return int(held < len(chosen))
