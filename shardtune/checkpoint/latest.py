"""Finds the latest checkpoint that is good to the last byte.

No weight is used before every file of its checkpoint has been read and hashed; the ranks divide
that work. What is wrong with a checkpoint that is passed over is said, never hidden.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardtune.checkpoint.async_saver import Ranks
from shardtune.checkpoint.commit_by_rename import checkpoints
from shardtune.checkpoint.hashed_file import find_damage
from shardtune.checkpoint.manifest import (
    MANIFEST_FILE,
    Damaged,
    Manifest,
    NewerFormat,
    read_manifest,
)
from shardtune.errors import Problem, RunError


@dataclass(frozen=True)
class LatestCheckpoint:
    """The checkpoint to go on from, if there is one, and those that were passed over, with why."""

    checkpoint: tuple[Path, Manifest] | None
    damaged: tuple[tuple[Path, str], ...] = ()
    others: tuple[tuple[Path, str], ...] = ()
    """Those of other runs: not ours to judge, nor to move."""

    @property
    def passed_over(self) -> tuple[tuple[Path, str], ...]:
        return (*self.damaged, *self.others)


def latest_checkpoint(folder: Path, run: str, ranks: Ranks) -> LatestCheckpoint:
    """The latest good checkpoint of `run`. All ranks look together and find the same.

    RunError if there are checkpoints of it and none of them is good, or if one is of a newer
    version.
    """
    damaged: list[tuple[Path, str]] = []
    others: list[tuple[Path, str]] = []
    names = json.loads(
        ranks.all_gather(json.dumps([path.name for _, path in checkpoints(folder)]))[0]
    )
    for name in reversed(names):
        path = folder / name
        found = read_together(path, run, ranks)
        if isinstance(found, Manifest):
            return LatestCheckpoint((path, found), tuple(damaged), tuple(others))
        if found.startswith(_ANOTHER):
            others.append((path, found.removeprefix(_ANOTHER)))
        else:
            damaged.append((path, found))
    if damaged:
        fix = "put a good copy back, or begin another run in a directory of its own"
        raise RunError([Problem(str(path), f"is damaged: {why}", fix) for path, why in damaged])
    return LatestCheckpoint(None, (), tuple(others))


def read_together(path: Path, run: str, ranks: Ranks) -> Manifest | str:
    """The manifest of a checkpoint whose every byte is good, or what is wrong with it. All ranks
    look together and find the same."""
    manifest, wrong = None, ""
    try:
        manifest = read_checked(path, run)
        wrong = next(damaged_files(path, manifest, ranks.rank, ranks.size), "")
    except OfAnotherRun as error:
        wrong = f"{_ANOTHER}{error}"
    except Damaged as error:
        wrong = str(error)
    except NewerFormat as error:
        fix = "use the version of shardtune that wrote it"
        raise RunError(Problem(str(path), str(error), fix)) from None
    reasons = [reason for reason in ranks.all_gather(wrong) if reason]
    return reasons[0] if manifest is None or reasons else manifest


class OfAnotherRun(Damaged):
    """A checkpoint that another run wrote: useless here, but maybe good."""


_ANOTHER = "another: "  # how a rank says so to the others


def read_checked(checkpoint: Path, run: str | None) -> Manifest:
    """The manifest, if it is the one of this folder and this run."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        raise Damaged("is no folder")
    manifest = read_manifest(checkpoint)
    if checkpoint.name != f"step-{manifest.step:06d}":
        raise Damaged(f"{MANIFEST_FILE} is that of step {manifest.step}")
    if run is not None and manifest.run != run:
        fact = f"{MANIFEST_FILE} is that of another run ({manifest.run}; this one is {run})"
        raise OfAnotherRun(fact)
    return manifest


def damaged_files(
    checkpoint: Path, manifest: Manifest, rank: int = 0, ranks: int = 1
) -> Iterator[str]:
    """What is wrong with this rank's share of the files, file by file; every byte is read."""
    if rank == 0:
        known = {MANIFEST_FILE, *manifest.files}
        there = {path.name for path in checkpoint.iterdir() if not path.name.startswith(".")}
        for name in sorted(there - known):
            yield f"{name} does not belong to it"
    for name in sorted(manifest.files)[rank::ranks]:
        wrong = find_damage(checkpoint / name, manifest.files[name], manifest.metadata(name))
        if wrong:
            yield f"{name} {wrong}"
