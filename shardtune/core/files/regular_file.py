"""Opens regular files only, and never waits for one.

What lies where a file should be may be a named pipe, a device or a link that leads in a circle; to
open a pipe waits until somebody writes.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a link"),
)


class NotAFile(OSError):
    """What lies there is no regular file; `strerror` says what it is."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """The file as bytes; NotAFile where it is of another kind."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags)
    except ValueError:
        raise OSError(errno.EINVAL, "a path can't hold a NUL character", repr(path)) from None
    except OSError:
        if why := other_kind(path, follow_links=follow_links):
            raise NotAFile(path, why) from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
        if why := _told(mode):
            raise NotAFile(path, why)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int, *, follow_links: bool = True) -> bytes:
    """The whole of a small file; OSError if it has more than `most` bytes."""
    with open_regular(path, follow_links=follow_links) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return found


def other_kind(path: Path, *, follow_links: bool = True) -> str:
    """What lies there instead of a file or a folder; nothing where it is one, or nothing is there.

    `follow_links` takes a link for what it leads to, and one that leads nowhere for what it is.
    """
    try:
        mode = (os.stat if follow_links else os.lstat)(path).st_mode
    except (OSError, ValueError):
        try:
            target = path.readlink()
        except (OSError, ValueError):
            return ""
        return f"is a link that leads nowhere ({target})"
    return _told(mode)


def _told(mode: int) -> str:
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "")
    return f"is {kind}, not a file" if kind else ""
