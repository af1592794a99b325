"""`shardtune data`: shows what the model will see."""

from __future__ import annotations

import argparse

from shardtune.cli.arguments import Commands, add_command, add_job


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "data",
        data,
        "show which tokens are trained, lengths, truncations",
        """\
  shardtune data recipes/quickstart.yaml
  shardtune data recipes/quickstart.yaml --examples 5 data.sequence_length=128""",
    )
    command.add_argument(
        "--examples", type=int, default=2, metavar="N", help="documents to print per set (2)"
    )
    add_job(command)


def data(arguments: argparse.Namespace) -> int:
    """Prints each data set as the model gets it."""
    from rich.console import Console

    from shardtune.cli.resolve_job import read_job
    from shardtune.data.inspect import view
    from shardtune.training.inputs import open_inputs

    _, resolved = read_job(arguments)
    inputs = open_inputs(resolved.job, quiet=False)
    Console().print(view(inputs.data, inputs.model.tokenizer, arguments.examples))
    return 0
