"""The run directory before a run: may it be written to, and is what lies there whole?"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.say import say

if TYPE_CHECKING:
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job import Job
    from shardtune.config.job_file import LoadedJob


def claim_directory(
    arguments: argparse.Namespace, loaded: LoadedJob, job: Job | None = None, *, first: bool = True
) -> RunDir:
    """The run's directory, if it may be written to. Only the first node asks: another one may come
    back to a run that goes on. Whether it may go on is told by the resolved `job`."""
    from shardtune.checkpoint import run_guards as guards
    from shardtune.checkpoint.run_dir import RunDir

    run, place = RunDir(Path(loaded.job.save.directory).expanduser()), ("save", "directory")
    if not first:
        return run
    guards.require_folder(run, loaded.place(place))
    guards.require_plain(run, loaded.place(place))
    if arguments.resume:
        guards.require_run(run)
        if job is not None:
            guards.require_resumable(run, job)
        guards.require_run_id(run)
        if os.environ.get("RANK", "0") == "0":
            for note in guards.notes_on(run):
                say(f"note: {note}")
        return run
    guards.require_safe_place(run, loaded.job, loaded.place(place))
    if arguments.overwrite:
        guards.require_overwritable(run, loaded.place(place))
    else:
        guards.require_unoccupied(run, loaded.place(place))
    return run


def mend_overwrite(directory: Path) -> None:
    """Ends an overwrite that was cut short, before anybody looks at the directory."""
    from shardtune.checkpoint.overwrite import is_unsettled, settle
    from shardtune.checkpoint.run_dir import RunDir

    run = RunDir(directory)
    if is_unsettled(run):
        with run.locked():
            if settle(run):
                say(f"{directory}: an overwrite was cut short; the run that was there is back")
