"""From `shardtune train` to ranks: what is looked at before any exists, and who starts them.

A command that is a rank already (under torchrun, in a Slurm step) only looks and trains. Any other
starts the ranks of this machine: alone, or together with the same command on other machines.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.arguments import Commands, add_command, add_job, add_nodes, count
from shardtune.cli.start.local_ranks import start_ranks
from shardtune.cli.start.nodes import this_node
from shardtune.cli.start.own_rank import train_as_rank
from shardtune.core.world import outside_ranks
from shardtune.errors import JobError, Problem
from shardtune.launch import LAUNCHER_PID
from shardtune.launch.output_stream import guard_output

if TYPE_CHECKING:
    from shardtune.launch.node import Node


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "train",
        start,
        "train a job",
        """\
  shardtune train recipes/quickstart.yaml
  shardtune train recipes/quickstart.yaml train.steps=10 save.directory=runs/try
  shardtune train recipes/quickstart.yaml --resume
  shardtune train recipes/quickstart.yaml --resume train.steps=48
  shardtune train recipes/zero1.yaml --nodes 2 --node-rank 0 --head host:29400
  torchrun --nproc-per-node 2 -m shardtune train recipes/quickstart.yaml
  accelerate launch --multi_gpu -m shardtune train recipes/quickstart.yaml""",
    )
    add_job(command)
    add_nodes(command)
    again = command.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="continue from the run's newest checkpoint"
    )
    again.add_argument("--overwrite", action="store_true", help="replace the run in save.directory")
    command.add_argument(
        "--restart-schedule",
        action="store_true",
        help="with --resume: restart the learning-rate schedule",
    )
    command.add_argument(
        "--ignore-forecast",
        action="store_true",
        help="run even if the forecast says it doesn't fit",
    )
    command.add_argument(
        "--profile",
        type=count,
        metavar="N",
        help="profile N steps after warm-up on each rank, for `shardtune diagnose`",
    )
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    shown.add_argument(
        "--json",
        action="store_true",
        help="print each line of metrics.jsonl as it is written, then the report, for programs",
    )


def start(arguments: argparse.Namespace) -> int:
    """The command `train`."""
    guard_output()
    _require_resume(arguments)
    node = this_node(arguments)
    if arguments.json and os.environ.get("RANK", "0") == "0" and LAUNCHER_PID not in os.environ:
        return _start_with_json(arguments, node)
    return _train_or_start(arguments, node)


def _train_or_start(arguments: argparse.Namespace, node: Node | None) -> int:
    """Trains where this is a rank; anywhere else starts them."""
    if outside_ranks() is not None:
        return train_as_rank(arguments)
    return start_ranks(arguments, node)


def _start_with_json(arguments: argparse.Namespace, node: Node | None) -> int:
    """Metrics on standard output, everything else on standard error."""
    from shardtune.cli.start.json_progress import printing_json
    from shardtune.config.job_file import load_job

    directory = load_job(arguments.job, arguments.overrides).job.save.directory
    with printing_json(Path(directory).expanduser()):
        arguments.quiet = True
        return _train_or_start(arguments, node)


def _require_resume(arguments: argparse.Namespace) -> None:
    """Refuses to begin a schedule anew in a run that only begins."""
    if arguments.restart_schedule and not arguments.resume:
        fact = "a run that begins has its schedule before it"
        raise JobError(Problem("--restart-schedule", fact, "give it with --resume"))
