"""After training: SmolLM2-135M is tuned for a few steps, then measured, asked, served and exported.

python -m tests.exam.after [--only NAME ...] [--keep FOLDER]

Each case is a function that gets the lab and says what it saw. Those of one command stand in one
file; a new file adds its cases to CASES.
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

from tests.exam import after_evaluate, after_export, after_serve
from tests.exam.after_lab import AfterCase, AfterLab
from tests.exam.case import Findings, Verdict

CASES: tuple[AfterCase, ...] = (
    *after_evaluate.CASES,
    *after_serve.CASES,
    *after_export.CASES,
)


def sit(case: AfterCase, lab: AfterLab) -> Verdict:
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
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave run and files there")
    arguments = parser.parse_args()
    only = tuple(arguments.only or ("",))
    cases = [case for case in CASES if case.name.startswith(only)]
    table = Table("case", "outcome", "seconds", "what was seen")
    held = 0
    with tempfile.TemporaryDirectory() as folder:
        lab = AfterLab(arguments.keep or Path(folder))
        lab.folder.mkdir(parents=True, exist_ok=True)
        for case in cases:
            begun = time.monotonic()
            verdict = sit(case, lab)
            held += verdict.outcome != "not held"
            seconds = f"{time.monotonic() - begun:.0f}"
            table.add_row(f"{case.name}: {case.title}", verdict.outcome, seconds, verdict.figure)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{held} of {len(cases)} cases held")
    return int(held < len(cases))


if __name__ == "__main__":
    sys.exit(main())
