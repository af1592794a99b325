"""Near names: the run or the model folder that a person may have meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shardtune.errors import did_you_mean

RUN_MARKS = ("job.yaml",)
MODEL_MARKS = ("job.yaml", "config.json")
_MOST = 1000  # folders that are looked at: a name misspelt is no reason to search a disk


def near_folder(name: str | Path, marks: Sequence[str] = RUN_MARKS) -> str:
    """The folder with the nearest name that holds one of the files `marks`: beside `name`, one
    level up, or below the current folder. Empty if none is near."""
    path = Path(name)
    with suppress(RuntimeError):  # a `~` that names no user
        path = path.expanduser()
    found = {_ending(each): str(each) for each in islice(_around(path, marks), _MOST)}
    return found.get(did_you_mean(_ending(path), found), "")


def _ending(path: Path) -> str:
    """Its last two names: those above are the same for all, and would make any two alike."""
    return "/".join(path.parts[-2:])


def _around(path: Path, marks: Sequence[str]) -> Iterator[Path]:
    for folder in dict.fromkeys((path.parent, path.parent.parent, Path())):
        if folder == Path(folder.anchor) and folder.anchor:
            continue  # the root of all files
        with suppress(OSError):
            for pattern in ("*", "*/*"):
                for each in islice(folder.glob(pattern), _MOST):
                    if any((each / mark).is_file() for mark in marks):
                        yield each
