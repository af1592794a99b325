"""The state of a run: running, done, failed or stopped, told by the files that it leaves.

A run that trains holds a lock on its folder. The lock is looked up in the kernel's list, because to
try it would take it for a moment, in which a run that starts would be refused. The list knows this
machine's processes only; in a folder that other machines share, recent writes tell: there a run
that was preempted seems to train for some minutes more.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

RunState = Literal["running", "done", "failed", "stopped"]

QUIET_SECONDS = 30.0  # without a write, on a disk of this machine
QUIET_SECONDS_SHARED = 600.0  # in a folder that other machines share: an evaluation writes nothing
QUIET_STEPS = 5  # or so many steps of the run
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs"}


def find_state(
    run_dir: Path,
    *,
    stopped: bool | None,
    failed_at: float | None,
    last_step: int,
    saved_step: int | None,
    step_seconds: float,
) -> RunState:
    """`stopped` is what the report says, None without one; `failed_at` is when the launcher gave
    up, `saved_step` the newest checkpoint's."""
    if stopped is not None:
        return "stopped" if stopped else "done"
    if is_locked(run_dir):
        return "running"
    written = last_write(run_dir)
    if failed_at is not None and failed_at >= written - 1.0:
        return "failed"
    local = _is_local(run_dir)
    patience = max(QUIET_SECONDS if local else QUIET_SECONDS_SHARED, QUIET_STEPS * step_seconds)
    # A run that is preempted leaves a checkpoint of its last step, and no report. So does one that
    # trains, until its next step; here it would hold the lock, elsewhere only its writes tell.
    saved = saved_step is not None and last_step == saved_step
    if time.time() - written < patience and not (saved and local):
        return "running"
    return "stopped" if saved else "failed"


def is_locked(run_dir: Path) -> bool:
    """Whether a process of this machine trains in the folder."""
    try:
        found = run_dir.stat()
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, ValueError):
        return False
    device, inode = found.st_dev, found.st_ino
    name = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    lines = (line.split() for line in locks.splitlines())
    return any("FLOCK" in line and "WRITE" in line and name in line for line in lines)


def last_write(run_dir: Path) -> float:
    """When the run wrote last, in seconds since the epoch; 0 where nothing is."""
    written = 0.0
    for name in ("metrics.jsonl", "run.json", "environment.json", "forecast.json", "answers.json"):
        with suppress(OSError):
            written = max(written, (run_dir / name).stat().st_mtime)
    return written


def _is_local(folder: Path) -> bool:
    """Whether only this machine writes to the folder's disk."""
    try:
        device = folder.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        words = line.split()
        if len(words) > 2 and words[2] == name and "-" in words:
            return words[words.index("-") + 1] in _LOCAL
    return False
