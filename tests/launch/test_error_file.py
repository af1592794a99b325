"""A rank that fails while its disk is full still says why."""

from __future__ import annotations

import os
import subprocess
import sys

from shardtune.launch import LAUNCHER_PID
from shardtune.launch.error_file import ERROR_FILE

RANK = """
from shardtune.launch.error_file import reporting_errors
with reporting_errors():
    raise ValueError("the cause")
"""


def test_what_the_error_file_does_not_take_is_printed() -> None:
    environment = os.environ | {ERROR_FILE: "/dev/full", LAUNCHER_PID: str(os.getpid())}
    done = subprocess.run(
        [sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ValueError: the cause" in done.stderr
    assert "No space left" not in done.stderr
