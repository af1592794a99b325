"""Atomic writes: a file or a folder has its old content or the new, whenever the power goes.

What is written lies beside its target under a name with a dot, is put on the disk, and is renamed:
only a rename inside one file system is atomic.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def atomic_write(path: Path, text: str) -> None:
    """Writes a small text file. One process at a time: the name beside it is always the same."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


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
