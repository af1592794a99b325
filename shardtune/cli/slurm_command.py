"""`shardtune slurm`: writes an sbatch script for a job."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from shardtune.cli.arguments import Commands, add_command, add_job


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "slurm",
        slurm,
        "write an sbatch script for a job",
        """\
  shardtune slurm recipes/zero3_full.yaml --nodes 2 --gpus 4 > job.sbatch
  shardtune slurm recipes/zero1.yaml --nodes 2 --gpus 4 --time 2-00:00:00""",
    )
    command.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    command.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="GPUs per node, one rank each"
    )
    command.add_argument(
        "--time", default="24:00:00", metavar="T", help="time limit, in Slurm's format (24:00:00)"
    )
    command.add_argument("--partition", metavar="NAME", help="partition")
    command.add_argument("--account", metavar="NAME", help="account")
    add_job(command)


def slurm(arguments: argparse.Namespace) -> int:
    """Prints an sbatch script. The job is checked here as far as it can be: for so many ranks."""
    from shardtune.config.auto import resolve
    from shardtune.config.job_file import load_job
    from shardtune.config.rules import check
    from shardtune.core.host.machine import Machine
    from shardtune.errors import JobError, Problem
    from shardtune.launch.sbatch import SlurmRequest, sbatch_script

    counts = {"--nodes": arguments.nodes, "--gpus": arguments.gpus}
    wrong = [
        Problem(name, f"is {count}", "give at least 1")
        for name, count in counts.items()
        if count < 1
    ]
    names = {"--partition": arguments.partition, "--account": arguments.account}
    wrong += [
        Problem(option, f"is {name!r}", "give a name without spaces")
        for option, name in names.items()
        if name is not None and not re.fullmatch(r"\S+", name)
    ]
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", arguments.time):
        wrong.append(
            Problem("--time", f"is {arguments.time!r}", "write 24:00:00, or 2-00:00:00 for days")
        )
    if wrong:
        raise JobError(wrong)
    loaded = load_job(arguments.job, arguments.overrides)
    ranks = arguments.nodes * arguments.gpus
    machine = Machine(cores=16 * arguments.gpus, gpus=arguments.gpus)
    job = resolve(loaded.job, machine, ranks, nodes=arguments.nodes).job
    check(job, loaded.place)
    wanted = SlurmRequest(
        arguments.nodes, arguments.gpus, arguments.time, arguments.partition, arguments.account
    )
    print(
        sbatch_script(arguments.job, arguments.overrides, Path(job.save.directory), wanted), end=""
    )
    return 0
