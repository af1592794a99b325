"""Atomic writes: a file or a folder has its old content or the new, whenever the power goes.

What is written lies beside its target under a name with a dot, is put on the disk, and is renamed:
only a rename inside one file system is atomic.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk is full, or what one user may have of it."""


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Gives an OSError the file's name: a `write` that finds the disk full has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or not error.errno:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def atomic_write(path: Path, text: str) -> None:
    """Writes a small text file. One process at a time: the name beside it is always the same, and
    goes where the disk doesn't take it all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming_file(path), partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


@contextmanager
def atomic_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and vanishes when not.

    It lies beside `target`, because only a rename inside one file system is atomic. If there is a
    `target` by then, it stays and ours is thrown away; with `replace` it is the other way round,
    and the old one goes only when the new one bears its name. Its files have the permissions that
    the umask gives, whatever a library has made them with.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if replace:
        restore_replaced(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        yield partial
        _apply_umask(partial)
        _sync_tree(partial)
        if replace:
            _replace(target, partial)
        else:
            _rename_unless_there(partial, target)
        sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if replace:
        shutil.rmtree(_name_of_old(partial), ignore_errors=True)


def restore_replaced(target: Path) -> None:
    """Gives a folder its name back that was being replaced when the process was killed. Nothing
    happens where there is a `target`."""
    if target.is_symlink() or target.exists() or not target.parent.is_dir():
        return
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.old\.partial")
    found = [path for path in target.parent.iterdir() if name.fullmatch(path.name)]
    found = [path for path in found if path.is_dir() and not path.is_symlink()]
    if found:
        max(found, key=lambda path: path.stat().st_mtime).rename(target)
        sync(target.parent)


def _rename_unless_there(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _replace(target: Path, partial: Path) -> None:
    """Two renames. If the second fails, the first is undone: one of the folders always stays."""
    old = _name_of_old(partial)
    try:
        if target.exists():
            target.rename(old)
        partial.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def _name_of_old(partial: Path) -> Path:
    return partial.with_suffix(".old.partial")


def _apply_umask(folder: Path) -> None:
    """Some libraries write through temporary files, which only their owner may read. What the umask
    is can't be asked without changing it for all threads; the folder was just made under it."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


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
