"""C++ parts that DeepSpeed compiles when they are first used, and what a killed compilation leaves.

torch lets one process compile: the one that could create a file `lock`, which it removes at the
end. A process that is killed before never does, and everyone who needs that part later waits for
ever, without a word.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

_LOG = logging.getLogger(__name__)
BUILD_QUIET_SECONDS = 120.0
"""Seconds without a new file after which a compilation on another machine counts as dead: the
slowest file takes half of that on one slow core."""


def clear_dead_builds(quiet: float = BUILD_QUIET_SECONDS) -> list[Path]:
    """Removes the locks of compilations that nobody is at any more; returns their paths."""
    return [lock for lock in _locks() if _cleared(lock, quiet)]


def _locks() -> list[Path]:
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return sorted(Path(chosen).glob("*/lock"))
    return sorted(Path(get_default_build_root()).glob("*/*/lock"))  # a folder for each Python


def _cleared(lock: Path, quiet: float) -> bool:
    # Ranks look at the same time: whoever is second must not remove the lock of the first, who
    # compiles by then.
    with (lock.parent / "clearing").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        said = False
        while lock.exists() and not _is_open(lock):
            if _age(lock.parent) > quiet:
                lock.unlink(missing_ok=True)
                return True
            if not said:
                message = "%s: no process here compiles; another machine has %.0f s to show it does"
                _LOG.warning(message, lock, quiet)
                said = True
            time.sleep(min(1.0, quiet))
    return False


def _is_open(lock: Path) -> bool:
    """Whether a process of this machine has the file open, as torch does while it compiles."""
    target = lock.resolve()
    return any(target in _open_files(each) for each in Path("/proc").glob("[0-9]*"))


def _open_files(process: Path) -> Iterator[Path]:
    with suppress(OSError):  # it has ended, or is somebody else's
        for link in (process / "fd").iterdir():
            with suppress(FileNotFoundError):
                yield link.readlink()


def _age(folder: Path) -> float:
    """Seconds since a file of the compilation changed."""
    changed = 0.0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            if file.name != "clearing":
                changed = max(changed, file.stat().st_mtime)
    return time.time() - changed
