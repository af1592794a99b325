"""`shardtune verify`: checks every byte of a run."""

from __future__ import annotations

import argparse
import json

from shardtune.cli.arguments import Commands, add_command, add_json, add_run_directory


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "verify",
        verify,
        "check every byte of a run's files, or of an export",
        "  shardtune verify runs/quickstart\n  shardtune verify out/gguf",
    )
    add_run_directory(command, "directory of a run, or an export's folder")
    add_json(command)


def verify(arguments: argparse.Namespace) -> int:
    """Prints what was found. Exit code 1 if anything is damaged."""
    from dataclasses import asdict

    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.checkpoint.verify import verify_run
    from shardtune.report.verify_table import print_verdicts

    verdicts = verify_run(RunDir(arguments.directory))
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    else:
        print_verdicts(verdicts)
    return int(any(verdict.faults for verdict in verdicts))
