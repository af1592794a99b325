"""What all ranks of a run must have in common."""

from __future__ import annotations

import json

from shardtune.config.job import Job
from shardtune.config.job_file import leaves
from shardtune.core.yaml_document import dotted
from shardtune.errors import Problem, RunError
from shardtune.launch.process_group import JoinedWorld


def require_agreement(world: JoinedWorld, job: Job) -> None:
    """Refuses ranks with different jobs. Our launcher gives all of them the same; those that
    torchrun or Slurm starts read it, and replace each `auto`, on their own machines."""
    if world.size == 1:
        return
    facts = leaves(job.model_dump(mode="json", exclude={"launch"}))
    said = [
        json.loads(text) for text in world.all_gather(json.dumps({dotted(k): v for k, v in facts}))
    ]
    first = said[0]
    problems = [
        Problem(
            key,
            f"is {first.get(key)!r} on rank 0, and {other.get(key)!r} on rank {rank}",
            "give it in the job, or start all ranks from one file on equal machines",
        )
        for rank, other in enumerate(said)
        for key in sorted(first.keys() | other.keys())
        if first.get(key) != other.get(key)
    ]
    if problems:
        raise RunError(problems)
