"""The error file: how a rank that fails tells its launcher why, where torchrun looks for it.

No torch here: its import takes seconds, in which a rank can be interrupted too.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shardtune.errors import FailureKind, Problem, ShardtuneError
from shardtune.launch import INTERRUPTED, LAUNCHER_PID

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True)
class ErrorReport:
    """Why a rank ended. `problems` is empty unless a person can act on it."""

    time: float
    traceback: str
    problems: tuple[Problem, ...]
    kind: FailureKind = "problem"


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Writes down what ends the block early, and leaves the talking to our launcher."""
    try:
        yield
    except KeyboardInterrupt:  # before `join_process_group`, which makes a first signal a request
        if LAUNCHER_PID not in os.environ:
            raise
        sys.exit(INTERRUPTED)
    except Exception as error:
        path = os.environ.get(ERROR_FILE)
        if path:
            try:
                _write(Path(path), error)
            except OSError:  # the disk is full, which may be why we are here: say it, then
                traceback.print_exception(error)
        if LAUNCHER_PID not in os.environ:
            raise
        # At once: to take a large interpreter down can take seconds, in which the others wait.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(getattr(error, "exit_code", 1))


def read_error_report(path: Path) -> ErrorReport | None:
    """None where a rank died without any."""
    try:
        return parse_error_report(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def parse_error_report(text: str) -> ErrorReport | None:
    """What an error file says; None if it is none."""
    try:
        found = json.loads(text)
        problems = tuple(Problem(**problem) for problem in found["problems"])
        text = found["message"]["extraInfo"]["py_callstack"]
        return ErrorReport(float(found["time"]), str(text).strip(), problems, found["kind"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(path: Path, error: BaseException) -> None:
    # torchrun reads `message`; the rest is ours.
    problems = error.problems if isinstance(error, ShardtuneError) else ()
    kind = error.kind if isinstance(error, ShardtuneError) else "fault"
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    found = {
        "message": message,
        "time": time.time(),
        "kind": kind,
        "problems": [asdict(problem) for problem in problems],
    }
    path.write_text(json.dumps(found), encoding="utf-8")
