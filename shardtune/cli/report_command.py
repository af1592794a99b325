"""`shardtune report`: the page of a run, or of several beside each other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.arguments import Commands, add_command
from shardtune.errors import Problem, RunError

if TYPE_CHECKING:
    from shardtune.core.runs.run_history import RunHistory


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "report",
        report,
        "write a run's page, or compare runs",
        """\
  shardtune report runs/quickstart
  shardtune report runs/quickstart runs/longer --out comparison.html""",
    )
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write it (RUN/report.html; comparison.html for several)",
    )


def report(arguments: argparse.Namespace) -> int:
    """Writes the page, and prints where."""
    from shardtune.core.runs.run_history import read_run_history
    from shardtune.report.comparison_page import comparison_page
    from shardtune.report.run_page import run_page

    runs = [read_run_history(path) for path in arguments.runs]
    if problems := [_no_run(run) for run in runs if not run.job_text and not run.steps]:
        raise RunError(problems)
    page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    target = arguments.out or _own_place(arguments.runs)
    _require_replaceable(target)
    _write(target, page)
    print(f"wrote {target} ({len(page.encode()) / 1000:,.0f} kB)")
    return 0


def _no_run(run: RunHistory) -> Problem:
    fact = "is no run directory: no job.yaml in it" if run.path.is_dir() else "no such folder"
    return Problem(str(run.path), fact, "name the `save.directory` of a run")


def _own_place(runs: list[Path]) -> Path:
    """In the run's folder, where the run lists the page as its own file."""
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.report.run_page import PAGE_FILE

    if len(runs) > 1:
        return Path("comparison.html")
    if not RunDir(runs[0]).owns(PAGE_FILE):
        fact = f"its marker doesn't list {PAGE_FILE}: the run is of an earlier version, or damaged"
        raise RunError(Problem(str(runs[0]), fact, f"say where to write: --out {PAGE_FILE}"))
    return runs[0] / PAGE_FILE


def _require_replaceable(target: Path) -> None:
    """Only a page of ours is replaced: a mistyped name must not cost a file."""
    from shardtune.report.html_page import is_ours

    if not target.parent.is_dir():
        raise RunError(Problem(str(target.parent), "no such folder", "make it, or name another"))
    if (target.exists() or target.is_symlink()) and not is_ours(target):
        fact = "exists already, and is no page of ours"
        raise RunError(Problem(str(target), fact, "name a file that doesn't exist yet: --out FILE"))


def _write(target: Path, page: str) -> None:
    from shardtune.core.files.atomic_write import atomic_write

    try:
        atomic_write(target, page)
    except OSError as error:
        fact = f"can't be written: {error.strerror}"
        raise RunError(Problem(str(target), fact, "name another file: --out FILE")) from None
