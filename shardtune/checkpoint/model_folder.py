"""A folder that a model is written to: a result, a merge, an export."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardtune.core.files.atomic_write import DISK_FULL, atomic_folder
from shardtune.core.units import MIB
from shardtune.errors import Problem, RunError

TAKES_NO_MORE = (*DISK_FULL, errno.EFBIG, errno.EROFS, errno.EIO)
"""The disk, whatever is written to it."""
_NO_PLACE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
)


@contextmanager
def model_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """`atomic_folder`, and RunError where there can't be one or the disk takes no more."""
    from safetensors import SafetensorError

    entered = False
    try:
        with atomic_folder(target, replace=replace) as partial:
            entered = True
            yield partial
    except (OSError, SafetensorError) as error:
        code = _number(error)
        if code in _NO_PLACE and not entered:
            raise _no_place(target, code) from error
        if code not in TAKES_NO_MORE:
            raise
        there = next(each for each in (target, *target.absolute().parents) if each.exists())
        free = f"{shutil.disk_usage(there).free / MIB:,.1f} MiB are free"
        fact = f"can't be written: {os.strerror(code)}; {free}"
        fix = "fix that, then run the command again; a run continues with --resume"
        raise RunError(Problem(str(target), fact, fix)) from error


def require_place(target: Path) -> None:
    """Refuses a target where no folder can be made, before there is work to lose."""
    probe = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise _no_place(target, error.errno or 0) from error


def _no_place(target: Path, code: int) -> RunError:
    fact = f"no folder can be made: {os.strerror(code)}"
    return RunError(Problem(str(target), fact, "fix that, or name another folder"))


def _number(error: Exception) -> int:
    """errno. safetensors' own error has it in its text, as Rust writes it: `(os error 28)`."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else 0
