"""What all ranks of a run must have in common, and what one of them checks for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict

from shardtune.config.job import Job
from shardtune.config.job_file import leaves
from shardtune.core.files.yaml_document import dotted
from shardtune.errors import ModelError, Problem, RunError, ShardtuneError
from shardtune.launch.process_group import JoinedWorld

_SAME_JOB = "give it in the job, or start all ranks from one file on equal machines"
_SAME_FILE = "give every machine the same file"


def require_agreement(world: JoinedWorld, job: Job, read: Mapping[str, str]) -> None:
    """Refuses ranks with different jobs, or that have `read` different files for it. Our launcher
    gives all of them the same job; those that torchrun or Slurm starts read it, and replace each
    `auto`, on their own machines."""
    if world.size == 1:
        return
    job_values = leaves(job.model_dump(mode="json", exclude={"launch"}))
    facts = {dotted(key): value for key, value in job_values} | dict(read)
    said = [json.loads(text) for text in world.all_gather(json.dumps(facts))]
    first = said[0]
    problems = [
        Problem(
            key,
            f"is {first.get(key)!r} on rank 0, and {other.get(key)!r} on rank {rank}",
            _SAME_FILE if key in read else _SAME_JOB,
        )
        for rank, other in enumerate(said)
        for key in sorted(first.keys() | other.keys())
        if first.get(key) != other.get(key)
    ]
    if problems:
        raise RunError(problems)


def checked_by_main_rank(world: JoinedWorld, check: Callable[[], None]) -> None:
    """Lets the main rank `check` what is the same on each; what it refuses, all of them refuse.
    Where the check itself fails, it raises that, and the others say so: none is left waiting."""
    failed: Exception | None = None
    if world.is_main:
        try:
            check()
        except Exception as error:  # noqa: BLE001  raised below, once the others know of it
            failed = error
    problems = () if failed is None else _as_told_to_others(failed, world.rank)
    refused = isinstance(failed, ModelError)
    told = json.dumps({"refused": refused, "problems": [asdict(each) for each in problems]})
    found = json.loads(world.all_gather(told)[0])
    if failed is not None:
        raise failed
    if found["problems"]:
        kind = ModelError if found["refused"] else RunError
        raise kind([Problem(**each) for each in found["problems"]])


def _as_told_to_others(error: Exception, rank: int) -> tuple[Problem, ...]:
    """What the other ranks say of it, whichever of them is heard first."""
    if isinstance(error, ShardtuneError):
        return error.problems
    first = str(error).strip().split("\n")[0]
    fact = f"failed while it checked for all ranks: {type(error).__name__}: {first}"
    return (Problem(f"rank {rank}", fact, "its own output has the traceback"),)
