"""The same command on several machines: which of them this is, and what all have to agree on."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardtune import __version__
from shardtune.cli.say import say
from shardtune.core.world import outside_ranks
from shardtune.errors import JobError, Problem, ShardtuneError
from shardtune.launch import SECRET
from shardtune.launch.slurm_env import slurm_step

if TYPE_CHECKING:
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job import Job
    from shardtune.launch.node import Node
    from shardtune.launch.peers import Launchers
    from shardtune.training.inputs import Inputs


def this_node(arguments: argparse.Namespace) -> Node | None:
    """Which of several nodes this is, as the command line or Slurm says; None on one machine. A
    task of Slurm that is a rank is told so as torchrun would."""
    told = {
        "--nodes": arguments.nodes, "--node-rank": arguments.node_rank, "--head": arguments.head
    }  # fmt: skip
    missing = [name for name, value in told.items() if value is None]
    if len(missing) < len(told):
        if missing:
            fact = "several nodes need --nodes, --node-rank and --head"
            raise JobError(Problem("command line", fact, f"add {' and '.join(missing)}"))
        return _node(arguments.nodes, arguments.node_rank, arguments.head, arguments.interface)
    step = None if outside_ranks() is not None else slurm_step(os.environ)
    if step is None:
        return None
    if step.is_launcher:
        head = f"{step.head}:{step.port}"
        return _node(step.nodes, step.node, head, arguments.interface)
    os.environ.update(step.rank_environment())
    return None


def _node(nodes: int, number: int, head: str, interface: str | None) -> Node:
    """Imports torch, for which a mistake in a job of one machine shouldn't wait."""
    from shardtune.launch.torch_env import quiet_sockets

    quiet_sockets()
    from shardtune.launch.node import Node

    return Node.parse(nodes, number, head, interface)


@contextmanager
def other_launchers(node: Node | None, job: Job) -> Iterator[Launchers | None]:
    """The launchers of the other nodes. They hear of us before we open anything: that may take
    long, and they shall know that we are there."""
    from shardtune.config.job import LocalLaunch

    if node is None:
        yield None
        return
    from shardtune.launch.multi_node import MultiNode

    assert isinstance(job.launch, LocalLaunch)
    if node.number == 0 and SECRET not in os.environ:
        say(f"note: {SECRET} is not set: who reaches {node.head}:{node.port} can join this run")
    processes = int(job.launch.processes) // node.count
    yield MultiNode(node, processes, wait=job.launch.rejoin, say=say)


@contextmanager
def telling(launchers: Launchers | None) -> Iterator[None]:
    """What is wrong here ends the wait of the others."""
    from shardtune.launch.multi_node import MultiNode

    try:
        yield
    except ShardtuneError as error:
        if isinstance(launchers, MultiNode):
            launchers.announce_refusal(error.problems)
            launchers.close()
        raise


def agree_on(launchers: Launchers | None, job: Job, inputs: Inputs, run: RunDir) -> None:
    """What has to be the same on all nodes."""
    import torch

    from shardtune.launch.multi_node import MultiNode

    if isinstance(launchers, MultiNode):
        said = job.model_dump_json(exclude={"launch"})
        launchers.must_match = {
            "train.precision": job.train.compute_precision,  # which `auto` takes by the machine
            "the job": hashlib.sha256(said.encode()).hexdigest()[:12],
            "the number of processes": launchers.processes,
            "shardtune": __version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__,
            **{f"data set {name}": digest[:12] for name, digest in inputs.data.digests().items()},
        }
        launchers.require_shared_folder(run.path)
