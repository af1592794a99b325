"""Seeing a run: the demo recipe is trained for a few steps, and a real browser looks at its pages.

python -m tests.exam.seeing [--only NAME ...] [--keep FOLDER] [--pictures]

Each case is a function that gets the lab and says what it saw; those of one command stand in one
file, and a new file adds its cases to CASES. `--pictures` replaces those under docs/pictures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.exam import see_report, seeing_dashboard
from tests.exam.case import Findings, Verdict
from tests.exam.seeing_lab import SeeingCase, SeeingLab

CASES: tuple[SeeingCase, ...] = (*see_report.CASES, *seeing_dashboard.CASES)


def sit(case: SeeingCase, lab: SeeingLab) -> Verdict:
    """Tries one case. What it raises is what doesn't hold."""
    findings = Findings()
    try:
        case.check(lab, findings)
    except Exception as error:
        traceback.print_exc()
        return Verdict("not held", f"{type(error).__name__}: {error}")
    return findings.verdict()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the run there")
    parser.add_argument("--pictures", action="store_true", help="write docs/pictures, too")
    arguments = parser.parse_args()
    only = tuple(arguments.only or ("",))
    cases = [case for case in CASES if case.name.startswith(only)]
    table = Table("case", "outcome", "seconds", "what was seen")
    held = 0
    with tempfile.TemporaryDirectory() as folder:
        lab = SeeingLab((arguments.keep or Path(folder)).resolve(), pictures=arguments.pictures)
        for case in cases:
            begun = time.monotonic()
            verdict = sit(case, lab)
            held += verdict.outcome != "not held"
            seconds = f"{time.monotonic() - begun:.0f}"
            table.add_row(f"{case.name}: {case.title}", verdict.outcome, seconds, verdict.figure)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{held} of {len(cases)} held")
    return int(held < len(cases))


if __name__ == "__main__":
    sys.exit(main())
