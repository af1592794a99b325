"""Things that are made once and kept: where they lie, and how several ranks make one without
talking to each other.

No collective is involved: ranks that ask for the same thing meet at a file lock, the first makes
it, the others find it made. A folder appears under its name only when it is complete, so "it is
there" always means "it is whole", also after a crash.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache for shardtune; it need not exist yet.

    `$XDG_CACHE_HOME/shardtune`, else `~/.cache/shardtune`, on every platform: it is where the
    other tools of this field keep their models too.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that a relative path is to be ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "shardtune"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, waiting for whoever holds it now, in any process or thread.

    The kernel drops the lock of a process that dies. The file itself stays: removing it would let
    a third process lock a new file while a second one still waits for the old one.
    """
    # Not at the top: Windows has no fcntl, and planning a run there needs no lock.
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back


@contextmanager
def atomic_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and vanishes when not.

    It lies beside `target`, because only a rename inside one file system is atomic. If there is a
    `target` by then, it stays and ours is thrown away; with `replace` it is the other way round,
    and the old one goes only when the new one is safe on the disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        yield partial
        _sync_tree(partial)
        if replace and target.exists():
            target.rename(partial.with_suffix(".old.partial"))
        try:
            partial.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(partial.with_suffix(".old.partial"), ignore_errors=True)


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, filled by `make(folder)` if it isn't there yet, by one process at a time."""
    if not target.exists():
        with file_lock(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                with atomic_folder(target) as partial:
                    make(partial)
    return target


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Put a file's bytes, or a folder's list of names, on the disk before anybody relies on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
