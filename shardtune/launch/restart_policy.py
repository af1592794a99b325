"""Whether a run that failed is started again: a limited number of times, and never a third time at
the same step, because then it isn't chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from shardtune.errors import Problem
from shardtune.launch.failure import Failure

SAME_STEP = 3  # failures at one step that end a run


@dataclass(frozen=True)
class RestartPolicy:
    """How much a run is helped along."""

    restarts: int = 0
    """How often it may be started again after a fault."""
    patience: float = 4.0
    """Seconds of silence inside a step after which a rank counts as hung, if steps are short."""
    grace: float = 30.0
    """Seconds that the ranks have after SIGTERM."""
    halvings: int = 0
    """How often the micro-batch may be halved when memory runs out."""
    halvings_at_start: int = 0
    """The same, as long as no attempt has come to a first step, and ranks say so themselves: whom
    the kernel kills has taken too much CPU memory."""


def past_attempts(logs: Path) -> int:
    """The number of the next one. Each has a folder of its own, also after somebody has tidied up:
    the error report of an earlier one, read again, would name a wrong cause."""
    numbers = [path.name.removeprefix("attempt-") for path in logs.glob("attempt-*")]
    return max((int(each) + 1 for each in numbers if each.isascii() and each.isdigit()), default=0)


def halvings(failures: Sequence[Failure], policy: RestartPolicy) -> int:
    """How often the micro-batch has to be halved after these."""
    early = takewhile(lambda failure: failure.step == 0, failures)
    at_start = sum(failure.kind == "memory" and failure.reported for failure in early)
    short = sum(failure.kind == "memory" for failure in failures)
    return max(min(policy.halvings, short), min(policy.halvings_at_start, at_start))


def count_faults(failures: Sequence[Failure]) -> int:
    """How many of them may pass when the run is started again."""
    return sum(failure.kind == "fault" for failure in failures)


def refuse_restart(failures: Sequence[Failure], policy: RestartPolicy) -> list[Problem] | None:
    """None if the run may be started again; else what is to be said about that besides."""
    last = failures[-1]
    if last.kind != "fault" or policy.restarts == 0:
        return []
    same = Counter(failure.step for failure in failures)[last.step]
    fix = "fix the cause above, then go on with --resume"
    if same >= SAME_STEP:
        fact = f"failed {same} times: that is no chance, so the run was not started again"
        return [Problem(f"step {last.step}", fact, fix)]
    if count_faults(failures) > policy.restarts:
        fact = f"the run was started again {policy.restarts} times, and failed again"
        return [Problem("launch.restarts", fact, fix)]
    return None
