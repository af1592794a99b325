"""`shardtune init`: writes a first job for a model and a data set, with comments."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from shardtune.cli.arguments import Commands, add_command
from shardtune.errors import JobError, Problem


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "init",
        init,
        "write a commented job for a model and a data set",
        """\
  shardtune init smollm2-135m-instruct data/code.jsonl
  shardtune init ./my-model talks.parquet --out talks.yaml""",
    )
    command.add_argument(
        "model", metavar="MODEL", help="a built-in name, a local folder or a hub id"
    )
    command.add_argument("data", metavar="DATA", help="a file, a folder or a hub id")
    command.add_argument(
        "--out", type=Path, default=Path("job.yaml"), metavar="FILE", help="the job (job.yaml)"
    )
    command.add_argument("--force", action="store_true", help="replace an existing file")


def init(arguments: argparse.Namespace) -> int:
    """Writes the job, unless a file stands in its place."""
    target: Path = arguments.out
    if target.is_dir():
        raise JobError(Problem("--out", f"{target} is a folder", f"name a file: {target}/job.yaml"))
    if target.exists() and not arguments.force:
        raise _in_the_way(target)

    from shardtune.cli.starter_job import starter_job
    from shardtune.core.files.atomic_write import atomic_write

    text = starter_job(arguments.model, arguments.data, target)
    try:
        if not arguments.force:
            target.open("x").close()
        atomic_write(target.resolve(), text)  # what it replaces stays where the disk is full
    except FileExistsError:  # written by somebody else meanwhile
        raise _in_the_way(target) from None
    except OSError as error:
        if not arguments.force and target.exists() and not target.stat().st_size:
            target.unlink()
        fact = f"{target} can't be written: {error.strerror}"
        raise JobError(Problem("--out", fact, "name a file in a folder that is there")) from None
    print(f"wrote {target}: read its comments, then")
    quoted = shlex.quote(str(target))
    print(f"  shardtune data {quoted}     which tokens are trained")
    print(f"  shardtune train {quoted}")
    return 0


def _in_the_way(target: Path) -> JobError:
    fix = "--out FILE writes another, --force replaces it"
    return JobError(Problem("--out", f"{target} is there already", fix))
