"""The folder of checkpoints: how one comes to be there, how one goes, and which ones are there.

A checkpoint is there if a folder bears its name, `step-000020`. Folders get and lose that name by a
rename, which happens or doesn't. Everything else begins with a dot and is rubbish after a crash.
"""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

from shardtune.checkpoint.hashed_file import write_file
from shardtune.checkpoint.manifest import MANIFEST_FILE, Manifest, render
from shardtune.core.atomic_write import sync

_CHECKPOINT = re.compile(r"step-(\d{6,})")
PARTIAL = ".partial"
REPLACED = ".replaced"  # a checkpoint whose step is being saved again
QUARANTINED = ".damaged"


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Every checkpoint by its name, the latest step last; whether it is good is not asked."""
    if not folder.is_dir():
        return []
    named = ((_CHECKPOINT.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def remove_partial(folder: Path) -> None:
    """Removes what was being written, or being removed, when a run was killed."""
    if folder.is_dir():
        for path in folder.glob(f".*{REPLACED}"):
            target = folder / path.name.removeprefix(".").removesuffix(REPLACED)
            _remove(path) if target.exists() else path.rename(target)
        for path in folder.glob(f".*{PARTIAL}"):
            _remove(path)


def partial_folder(folder: Path, step: int) -> Path:
    """The folder that the ranks write their files to, before it is a checkpoint."""
    return folder / f".{checkpoint_name(step)}{PARTIAL}"


def begin(folder: Path, step: int) -> None:
    """Makes an empty folder for the checkpoint of `step`."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = partial_folder(folder, step)
    _remove(partial)
    partial.mkdir()


def abandon(folder: Path, step: int) -> None:
    _remove(partial_folder(folder, step))


def commit(folder: Path, manifest: Manifest) -> Path:
    """Makes a checkpoint of what the ranks have written: from here on it is there, and lasts.

    Their files are on the disk already. The manifest follows, then the list of names, then the
    rename, then the parent's list of names.
    """
    partial = partial_folder(folder, manifest.step)
    write_file(partial / MANIFEST_FILE, [memoryview(render(manifest).encode())])
    sync(partial)
    target = folder / checkpoint_name(manifest.step)
    before = folder / f".{target.name}{REPLACED}"
    if target.exists():  # the same step, saved again: a crash between the renames is mended later
        _remove(before)
        target.rename(before)
    partial.rename(target)
    sync(folder)
    _remove(before)
    return target


def rotate(folder: Path, keep: int) -> list[Path]:
    """Takes their names from all but the `keep` latest checkpoints; they can then be removed."""
    return [_renamed(path) for _, path in checkpoints(folder)[:-keep]]


def quarantine(checkpoint: Path) -> Path:
    """Takes a damaged checkpoint out of the row, for a person to look at."""
    target = checkpoint.with_name(checkpoint.name + QUARANTINED)
    _remove(target)
    checkpoint.rename(target)
    sync(checkpoint.parent)
    return target


def remove(path: Path) -> None:
    """Removes a folder that is no checkpoint any more."""
    _remove(path)


def _renamed(path: Path) -> Path:
    target = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    path.rename(target)
    return target


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
