"""Python reads this before anything else where the exam puts this folder on its path."""

import os
import sys

if "EXAM_FAULTS" in os.environ:
    # As if they were not there: no run of the exam has 4-bit weights or storage in a cloud, and
    # peft and accelerate import what does that, for more than a second in each rank of each start.
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    sys.modules["boto3"] = None  # type: ignore[assignment]

if "EXAM_FAULTS" in os.environ and "RANK" in os.environ:
    from tests.exam import faults

    faults.install(os.environ["EXAM_FAULTS"], int(os.environ["RANK"]))
