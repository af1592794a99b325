"""After training: SmolLM2-135M is tuned for a few steps, then measured, asked, served and exported.

python -m tests.exam.after [--only NAME ...] [--keep FOLDER]

The cases of one command stand in one file; a new file adds its cases to CASES.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.exam import after_evaluate, after_export, after_serve
from tests.exam.after_lab import AfterCase, AfterLab
from tests.exam.named_cases import exam_arguments, sit_cases

CASES: tuple[AfterCase, ...] = (
    *after_evaluate.CASES,
    *after_serve.CASES,
    *after_export.CASES,
)


def main() -> int:
    arguments = exam_arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lab = AfterLab(arguments.keep or Path(folder))
        lab.folder.mkdir(parents=True, exist_ok=True)
        return sit_cases(CASES, lab, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
