"""Things that are made once and kept: where they lie, and how several ranks make one without
talking to each other.

No collective is involved: ranks that ask for the same thing meet at a file lock, the first makes
it, the others find it made. A folder appears under its name only when it is complete, so "it is
there" always means "it is whole", also after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardtune.core.files.atomic_write import atomic_folder


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


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, filled by `make(folder)` if it isn't there yet, by one process at a time."""
    if not target.exists():
        with file_lock(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                with atomic_folder(target) as partial:
                    make(partial)
    return target
