"""Checks every byte of what a run has left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardtune.checkpoint.commit_by_rename import checkpoints
from shardtune.checkpoint.latest import damaged_files, read_checked
from shardtune.checkpoint.manifest import Damaged, NewerFormat
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_run
from shardtune.checkpoint.seal import files_of, folder_faults


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
    """Every checkpoint, in the order of their steps, and the result if there is one."""
    require_run(run)
    here = run.run_id()
    found = [_checkpoint(path, here) for _, path in checkpoints(run.checkpoints)]
    if here is None:
        fault = "can't be read: which run this is, and so whose checkpoints, is unknown"
        found.insert(0, Verification("environment.json", faults=(fault,)))
    if run.result.exists():
        found.append(_result(run.result))
    return found


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
