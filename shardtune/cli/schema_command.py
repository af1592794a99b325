"""`shardtune schema`: prints the JSON Schema of a job."""

from __future__ import annotations

import argparse
import json

from shardtune.cli.arguments import Commands, add_command


def add_parser(commands: Commands) -> None:
    add_command(
        commands,
        "schema",
        schema,
        "print the JSON Schema of a job, for editors",
        "  shardtune schema > job.schema.json",
    )


def schema(arguments: argparse.Namespace) -> int:
    """Prints the schema."""
    from shardtune.config.job import Job

    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    print(json.dumps({**dialect, **Job.model_json_schema()}, indent=2))
    return 0
