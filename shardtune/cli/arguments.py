"""What the parsers of several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    """The parser of one command; `run` is called with what it read."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="example:\n" + examples,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def text(word: str) -> str:
    """A word of the command line that is text: what isn't UTF-8 arrives as half surrogates."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8 text") from None
    return word


def count(word: str) -> int:
    """A whole number of at least 1."""
    try:
        found = int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word[:60]!r} is no whole number") from None
    if not 1 <= found <= 10**9:
        raise argparse.ArgumentTypeError(f"is {word[:60]}; it must be from 1 to 1,000,000,000")
    return found


def temperature(word: str) -> float:
    """A number from 0 on."""
    try:
        found = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word[:60]!r} is no number") from None
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"is {word[:60]}; it must be a number from 0 on")
    return found


def add_job(command: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """A job file and changes to it."""
    if optional:
        command.add_argument(
            "job", type=Path, nargs="?", metavar="JOB", help="the job, a YAML file"
        )
    else:
        command.add_argument("job", type=Path, metavar="JOB", help="the job, a YAML file")
    change = "override a value of the job, as train.learning_rate=1e-4"
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=change)


def add_run_directory(command: argparse.ArgumentParser, what: str = "directory of a run") -> None:
    """The directory of a run that is there."""
    command.add_argument("directory", type=Path, metavar="RUN", help=what)


def add_nodes(command: argparse.ArgumentParser) -> None:
    """Which of several nodes this is."""
    nodes = command.add_argument_group("several nodes", "the same command on each of them")
    nodes.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    nodes.add_argument("--node-rank", type=int, metavar="K", help="rank of this node, from 0")
    nodes.add_argument("--head", metavar="HOST:PORT", help="address of node 0")
    nodes.add_argument(
        "--interface", metavar="NAME", help="network interface (the one that leads to the head)"
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """JSON instead of a table."""
    command.add_argument("--json", action="store_true", help="print JSON, for programs")
