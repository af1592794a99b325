"""One rule over a whole job: the key it speaks of, the test that must be false, fact and fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardtune.config.job import AdamW, Job
from shardtune.core.files.yaml_document import KeyPath
from shardtune.errors import Problem


@dataclass(frozen=True)
class Rule:
    """One row of the table. `fact` and `fix` may name numbers and strategies: they see the job."""

    name: str
    key: KeyPath
    broken: Callable[[Job], bool]
    fact: Callable[[Job], str]
    fix: str | Callable[[Job], str]

    def problem(self, job: Job, place: Callable[[KeyPath], str]) -> Problem:
        """What is told of a job that breaks it."""
        fix = self.fix if isinstance(self.fix, str) else self.fix(job)
        return Problem(place(self.key), self.fact(job), fix)


def rank_count(job: Job) -> int:
    """Ranks of a job; one where that is still `auto`."""
    return job.launch.processes if isinstance(job.launch.processes, int) else 1


def moment_bits(job: Job) -> int:
    """Bits of each number that the optimizer remembers."""
    return job.train.optimizer.bits if isinstance(job.train.optimizer, AdamW) else 32
