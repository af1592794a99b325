"""`shardtune show`: prints a job with every value resolved."""

from __future__ import annotations

import argparse

from shardtune.cli.arguments import Commands, add_command, add_job


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "show",
        show,
        "print a job with every value resolved, and where it came from",
        "  shardtune show recipes/quickstart.yaml train.global_batch=32",
    )
    add_job(command)


def show(arguments: argparse.Namespace) -> int:
    """Prints the job."""
    from shardtune.cli.resolve_job import read_job
    from shardtune.report.job_table import print_job

    loaded, resolved = read_job(arguments)
    print_job(resolved.job, resolved.reasons, loaded.origin, notes=resolved.notes)
    return 0
