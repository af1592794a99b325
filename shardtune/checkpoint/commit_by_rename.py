"""The folder of checkpoints: how one comes to be there, how one goes, and which ones are there.

A checkpoint is there if a folder bears its name, `step-000020`. Folders get and lose that name by a
rename, which happens or doesn't. What else a save leaves begins with a dot and is rubbish after a
crash. Only what a checkpoint consists of is ever deleted, and only if it is of the run itself: the
rest of what lies here belongs to somebody else.
"""

from __future__ import annotations

import errno
import re
import secrets
from contextlib import suppress
from itertools import count
from pathlib import Path

from shardtune.checkpoint.hashed_file import write_file
from shardtune.checkpoint.manifest import MANIFEST_FILE, SHARD_FILE, Manifest, render
from shardtune.core.files.atomic_write import sync

_CHECKPOINT = re.compile(r"step-(\d{6,})")
_UNNAMED = re.compile(r"\.step-\d{6,}(\.[0-9a-f]{8})?\.partial|\.step-\d{6,}\.replaced")
_RUN = re.compile(rb'"run":"([^"]{1,64})"')
_HEAD = 1 << 20  # bytes of a shard in which its run is named
PARTIAL = ".partial"
REPLACED = ".replaced"  # a checkpoint whose step is being saved again
QUARANTINED = ".damaged"
OF_ANOTHER_RUN = ".of-another-run"


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Every checkpoint by its name, the latest step last; whose it is, and whether it is good, is
    not asked."""
    if not folder.is_dir():
        return []
    named = ((_CHECKPOINT.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def own_checkpoints(folder: Path, run: str) -> list[tuple[int, Path]]:
    """The checkpoints of one run, the latest step last; whether they are good is not asked."""
    found = checkpoints(folder)
    return [(step, path) for step, path in found if _is_folder(path) and run_of(path) == run]


def run_of(checkpoint: Path) -> str | None:
    """The run that a checkpoint says it is of, in its manifest or else in a shard; None if neither
    can be read."""
    with suppress(OSError):
        shards = [path for path in checkpoint.iterdir() if SHARD_FILE.fullmatch(path.name)]
        for path in (checkpoint / MANIFEST_FILE, *sorted(shards)):
            if path.is_symlink() or not path.is_file():
                continue
            with path.open("rb") as file:
                said = _RUN.search(file.read(-1 if path.name == MANIFEST_FILE else _HEAD))
            if said:
                return said[1].decode(errors="replace")
    return None


def foreign_files(checkpoint: Path) -> list[str]:
    """What lies in a checkpoint's folder, complete or not, that no checkpoint consists of."""
    return sorted(path.name for path in checkpoint.iterdir() if not _is_ours(path))


def remove_partial(folder: Path) -> None:
    """Removes what was being written, or being removed, when a run was killed."""
    if not folder.is_dir():
        return
    left = [path for path in folder.iterdir() if _is_folder(path) and is_unnamed(path)]
    for path in left:
        target = folder / path.name.removeprefix(".").removesuffix(REPLACED)
        if path.name.endswith(REPLACED) and not target.exists():
            path.rename(target)
        else:
            with suppress(OSError):  # something of somebody else's is in it
                remove(path)


def is_unnamed(path: Path) -> bool:
    """Whether a save that was cut short would leave something of this name."""
    return _UNNAMED.fullmatch(path.name) is not None


def partial_folder(folder: Path, step: int) -> Path:
    """The folder that the ranks write their files to, before it is a checkpoint."""
    return folder / f".{checkpoint_name(step)}{PARTIAL}"


def begin(folder: Path, step: int) -> None:
    """Makes an empty folder for the checkpoint of `step`."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = partial_folder(folder, step)
    remove(partial)
    partial.mkdir()


def abandon(folder: Path, step: int) -> None:
    remove(partial_folder(folder, step))


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
    if target.is_symlink() or target.exists():
        if not _may_go(target, manifest.run):
            set_aside(target, OF_ANOTHER_RUN)
        else:  # the same step, saved again: a crash between the renames is mended later
            remove(before)
            target.rename(before)
    partial.rename(target)
    sync(folder)
    remove(before)
    return target


def rotate(folder: Path, keep: int, run: str, spared: int | None = None) -> list[Path]:
    """Takes their names from all but the `keep` latest checkpoints of a run, and that of the step
    `spared`; they can then be removed. One that holds something else as well stays."""
    old = own_checkpoints(folder, run)[:-keep]
    return [_renamed(path) for step, path in old if step != spared and not foreign_files(path)]


def quarantine(checkpoint: Path) -> Path:
    """Takes a damaged checkpoint out of the row, for a person to look at."""
    return set_aside(checkpoint, QUARANTINED)


def set_aside(path: Path, suffix: str) -> Path:
    """Renames a file or folder, with all that is in it, to a name that nothing has yet."""
    names = (f"{path.name}{suffix}" + f"-{number}" * (number > 1) for number in count(1))
    target = next(path.with_name(name) for name in names if not _lies_there(path.with_name(name)))
    path.rename(target)
    sync(path.parent)
    return target


def remove(path: Path) -> None:
    """Removes a folder that is no checkpoint any more, if it is there; OSError if it holds anything
    that no checkpoint consists of, which stays."""
    if not _lies_there(path):
        return
    if not _is_folder(path):
        raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(path))
    for each in path.iterdir():
        if _is_ours(each):
            each.unlink()
    path.rmdir()


def _may_go(checkpoint: Path, run: str) -> bool:
    return _is_folder(checkpoint) and run_of(checkpoint) == run and not foreign_files(checkpoint)


def _renamed(path: Path) -> Path:
    target = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    path.rename(target)
    return target


def _is_ours(path: Path) -> bool:
    named = path.name == MANIFEST_FILE or SHARD_FILE.fullmatch(path.name) is not None
    return named and (path.is_symlink() or not path.is_dir())


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _lies_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()
