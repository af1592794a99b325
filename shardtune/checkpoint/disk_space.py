"""The room that a run needs on its disk, known before its first step."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from shardtune.core.units import GIB
from shardtune.errors import Problem, RunError

_SMALL = 1 << 20  # tokenizer, configuration, metrics


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a run will have on its disk at most."""

    checkpoint: int
    copies: int
    """Checkpoints that lie there at the same time: those that are kept, and the one being made."""
    result: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.copies + self.result + _SMALL


def estimate_disk(trained: int, moments: int, *, keep: int, saves: int, result: int) -> DiskNeed:
    """For `trained` weights with so many moments, in fp32, and `saves` checkpoints in all."""
    return DiskNeed(4 * trained * (1 + moments), min(keep + 1, saves), result)


def require_disk_space(folder: Path, need: DiskNeed, freed: int = 0) -> None:
    """RunError with the numbers if the disk can't hold it; checkpoints that are there count, and so
    do bytes that will be `freed`."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    has = size_of(folder / "checkpoints") + freed
    free = shutil.disk_usage(there).free
    if need.total > free + has:
        fact = (
            f"the run needs {_size(need.total)} ({need.copies} checkpoints of "
            f"{_size(need.checkpoint)}, a result of {_size(need.result)}); {_size(free + has)} are "
            f"free in {there}"
        )
        fix = "make room, set save.directory elsewhere, or lower save.keep"
        raise RunError(Problem("save.directory", fact, fix))


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder, which need not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"
