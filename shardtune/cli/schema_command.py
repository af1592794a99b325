"""`shardtune schema`: prints the JSON Schema of a job, or of what commands and runs write."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardtune.cli.arguments import Commands, add_command

if TYPE_CHECKING:
    from pydantic import TypeAdapter

DIALECT = "https://json-schema.org/draft/2020-12/schema"
KINDS = ("job", "plan", "estimate", "report", "metrics")


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "schema",
        schema,
        "print the JSON Schema of a job or of a command's output",
        """\
  shardtune schema > job.schema.json
  shardtune schema --of report""",
    )
    command.add_argument(
        "--of",
        choices=KINDS,
        default="job",
        help="job (the default), `plan --json`, `estimate --json`, report.json, or a line of "
        "metrics.jsonl",
    )


def schema(arguments: argparse.Namespace) -> int:
    """Prints the schema."""
    found = {"$schema": DIALECT, **adapter_of(arguments.of).json_schema()}
    print(json.dumps(found, indent=2))
    return 0


def adapter_of(kind: str) -> TypeAdapter[Any]:
    """What reads and describes the JSON of a kind."""
    from pydantic import TypeAdapter

    from shardtune.config.job import Job
    from shardtune.core.runs.metrics import MetricsLine
    from shardtune.core.runs.run_report import RunReport
    from shardtune.plan.forecast_summary import EstimateResult, PlanResult

    types: dict[str, Any] = {
        "job": Job,
        "plan": PlanResult,
        "estimate": EstimateResult,
        "report": RunReport,
        "metrics": MetricsLine,
    }
    return TypeAdapter(types[kind])
