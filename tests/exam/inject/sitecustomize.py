"""Python reads this before anything else where the exam puts this folder on its path."""

import os

if "EXAM_FAULTS" in os.environ and "RANK" in os.environ:
    from tests.exam import faults

    faults.install(os.environ["EXAM_FAULTS"], int(os.environ["RANK"]))
