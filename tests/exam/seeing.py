"""Seeing a run: the demo recipe is trained for a few steps, and a real browser looks at its pages.

python -m tests.exam.seeing [--only NAME ...] [--keep FOLDER] [--pictures]

The cases of one command stand in one file; a new file adds its cases to CASES. `--pictures`
replaces those under docs/pictures.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.exam import see_report, seeing_dashboard
from tests.exam.named_cases import exam_arguments, sit_cases
from tests.exam.seeing_lab import SeeingCase, SeeingLab

CASES: tuple[SeeingCase, ...] = (*see_report.CASES, *seeing_dashboard.CASES)


def main() -> int:
    parser = exam_arguments(__doc__)
    parser.add_argument("--pictures", action="store_true", help="write docs/pictures, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lab = SeeingLab((arguments.keep or Path(folder)).resolve(), pictures=arguments.pictures)
        return sit_cases(CASES, lab, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
