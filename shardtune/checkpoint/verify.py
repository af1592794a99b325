"""Checks every byte of what a run has left."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from shardtune.checkpoint.commit_by_rename import checkpoints
from shardtune.checkpoint.latest import damaged_files, read_checked
from shardtune.checkpoint.manifest import MANIFEST_FILE, Damaged, NewerFormat
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_run
from shardtune.checkpoint.run_marker import MARKER_FILE
from shardtune.checkpoint.seal import files_of, folder_faults
from shardtune.errors import Problem, RunError


@dataclass(frozen=True)
class Verification:
    """One checkpoint, or the result: what it is, and what is wrong with it."""

    name: str
    written_by: str = ""
    """Strategy and ranks; empty for a result."""
    files: int = 0
    bytes: int = 0
    faults: tuple[str, ...] = ()


def verify_run(run: RunDir) -> list[Verification]:
    """Every checkpoint, in the order of their steps, and the result if there is one; or an export,
    which is a sealed folder without a run."""
    if not run.job.exists() and (run.path / MANIFEST_FILE).is_file():
        return [_result(run.path)]
    require_run(run)
    here = run.run_id()
    found = [_checkpoint(path, here) for _, path in checkpoints(run.checkpoints)]
    if here is None:
        fault = "can't be read: which run this is, and so whose checkpoints, is unknown"
        found.insert(0, Verification(MARKER_FILE, faults=(fault,)))
    if run.result.exists():
        found.append(_result(run.result))
    elif (report := run.read_report()) is not None and report.finished:
        fault = f"is missing; `{_resumed(run)}` writes it again"
        found.append(Verification(run.result.name, faults=(fault,)))
    return found


def require_sound_result(run: RunDir) -> None:
    """Refuses a result of which any byte is another than was written: RunError with every fault."""
    found = _result(run.result)
    if found.faults:
        fix = "put a good copy back, or write it again from the last checkpoint: "
        fix += _resumed(run)
        raise RunError([Problem(str(run.result), fault, fix) for fault in found.faults[:5]])


def _resumed(run: RunDir) -> str:
    """The command that goes on with it."""
    return f"shardtune train {shlex.quote(str(run.job))} --resume"


def _checkpoint(path: Path, run: str | None) -> Verification:
    name = f"{path.parent.name}/{path.name}"
    try:
        manifest = read_checked(path, run)
    except (Damaged, NewerFormat) as error:
        return Verification(name, faults=(str(error),))
    by = f"{manifest.strategy} x{manifest.ranks}"
    wrong = tuple(damaged_files(path, manifest))
    return Verification(name, by, len(manifest.files), manifest.bytes, wrong)


def _result(path: Path) -> Verification:
    try:
        files = files_of(path)
    except Damaged as error:
        return Verification(path.name, faults=(str(error),))
    size = sum(each.bytes for each in files.values())
    return Verification(path.name, "", len(files), size, tuple(folder_faults(path, files)))
