"""Everything that shardtune raises on purpose.

    ShardtuneError              a person can act on it: printed without a traceback, exit code 2
    ├── JobError                the job file or its overrides are wrong
    ├── DataError               the data can't be trained on as it is
    ├── ModelError              the model can't be found, fetched, read or adapted
    ├── RunError                the run directory or the result is not what it should be
    ├── BrokenWeights           weights are no longer finite; an earlier checkpoint may be good
    ├── OutOfMemory             a step ran out of memory; a smaller micro-batch may fit
    └── LaunchError             a process of the run died (carries its own report): exit code 1
        └── LaunchRefused       it refused to run, and would again: exit code 2

An error is a list of problems, because a person who fixes one wants to see the others too.
Each problem names the place, states the fact with its numbers, and offers the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

FailureKind = Literal["fault", "memory", "problem"]
"""A `fault` may pass after a restart, `memory` with a smaller micro-batch; a `problem` needs a
person."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what, and what to do about it."""

    place: str
    fact: str
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.place}: {self.fact}" if self.place else self.fact
        return f"{head}\n    fix: {self.fix}" if self.fix else head


class ShardtuneError(Exception):
    """Base of all errors that a person can act on."""

    exit_code = 2
    kind: ClassVar[FailureKind] = "problem"

    def __init__(self, problems: str | Problem | Sequence[Problem], *, fix: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem("", problems, fix)
        if isinstance(problems, Problem):
            problems = [problems]
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ShardtuneError], tuple[tuple[Problem, ...]]]:
        # Errors cross process boundaries; the default would lose the list of problems.
        return (type(self), (self.problems,))


class JobError(ShardtuneError):
    """The job file or its overrides are wrong."""


class DataError(ShardtuneError):
    """The data can't be trained on as it is."""


class ModelError(ShardtuneError):
    """The model can't be found, fetched, read or adapted."""


class RunError(ShardtuneError):
    """The run directory or the result is not what it should be."""


class BrokenWeights(ShardtuneError):
    """Weights are no longer finite; an earlier checkpoint may be good."""

    exit_code = 1
    kind = "fault"


class OutOfMemory(ShardtuneError):
    """A step ran out of memory; a smaller micro-batch may fit."""

    kind = "memory"


class LaunchError(ShardtuneError):
    """A process of the run died; the problems carry that process's own report."""

    exit_code = 1


class LaunchRefused(LaunchError):
    """A process of the run, or a machine, refused what was asked of it: a person has to act."""

    exit_code = 2


def either(words: Sequence[str]) -> str:
    """Alternatives in a sentence: `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else ""
