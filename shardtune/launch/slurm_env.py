"""The world as Slurm tells it to the tasks of a step.

A step with several tasks on a node has one task a rank. A step with one task on each of several
nodes has one launcher a node. Anything else (a batch script, an interactive shell) is one machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardtune.errors import JobError, Problem

FIRST_PORT, PORTS = 20_000, 10_000
"""Ports for rendezvous; below those that a kernel gives away by itself."""


@dataclass(frozen=True)
class SlurmStep:
    """This task's place in its step."""

    rank: int
    tasks: int
    local_rank: int
    local_tasks: int
    node: int
    nodes: int
    head: str
    """The host of the first task."""
    port: int
    """The same on all tasks, another in each job and each step."""

    @property
    def is_launcher(self) -> bool:
        """Whether the task stands for a whole node."""
        return self.tasks == self.nodes

    def rank_environment(self) -> dict[str, str]:
        """What torchrun would have told a rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.tasks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_tasks),
            "MASTER_ADDR": self.head,
            "MASTER_PORT": str(self.port),
        }


def slurm_step(environment: Mapping[str, str]) -> SlurmStep | None:
    """The step that this process is a task of; None outside of one, or if it is the only task.

    A batch script has Slurm's variables too, but no step.
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    try:
        tasks = int(environment["SLURM_STEP_NUM_TASKS"])
        if tasks == 1:
            return None
        rank, node = int(environment["SLURM_PROCID"]), int(environment["SLURM_NODEID"])
        nodes = int(environment["SLURM_STEP_NUM_NODES"])
        per_node = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        return SlurmStep(
            rank=rank,
            tasks=tasks,
            local_rank=int(environment["SLURM_LOCALID"]),
            local_tasks=per_node[node],
            node=node,
            nodes=nodes,
            head=hosts(environment["SLURM_STEP_NODELIST"])[0],
            port=_port(environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]),
        )
    except (KeyError, ValueError, IndexError) as error:
        fact = f"the step's variables are not as Slurm sets them: {type(error).__name__}: {error}"
        raise JobError(Problem("Slurm", fact, "start the step with srun")) from None


def hosts(nodelist: str) -> list[str]:
    """`n1,gpu[08-10]` is n1, gpu08, gpu09 and gpu10, as `scontrol show hostnames` would say."""
    found: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", nodelist):
        found += _expanded(part)
    return found


def _expanded(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, numbers, after = match.groups()
    names: list[str] = []
    for piece in numbers.split(","):
        first, _, last = piece.partition("-")
        run = range(int(first), int(last or first) + 1)
        names += [f"{before}{number:0{len(first)}}" for number in run]
    return [name + rest for name in names for rest in _expanded(after)]


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is two tasks on each of three nodes, and one on a fourth."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text!r} is no number of tasks per node")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _port(job: str, step: str) -> int:
    return FIRST_PORT + (int(job) * 16 + int(step)) % PORTS
