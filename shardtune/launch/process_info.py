"""What the kernel knows about a process, and what the process says when it is asked.

Everything here works on a process that can't answer. Where there is no /proc, nothing is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

from shardtune.launch import STACK_FILE

STACK_SIGNAL = signal.SIGUSR2
STOPPED = "T"
_EXITING = 0x4  # PF_EXITING of the kernel's sched.h
_STACK_LINES = 14
_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")


def dump_stack_on_signal() -> None:
    """From now on this process writes its stack down when asked; also while it holds the GIL."""
    path = os.environ.get(STACK_FILE)
    if path is not None:
        file = Path(path).open("w")  # noqa: SIM115  as long as the process lives
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


def request_stack(pid: int, file: Path, *, wait: float = 0.5) -> str:
    """The innermost lines of a process's stack; empty if it gave no answer."""
    if process_state(pid) == STOPPED:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        time.sleep(0.05)
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        if text.rstrip():
            return _main_thread(text)
    return ""


def process_state(pid: int) -> str:
    """R running, S sleeping, D waiting for a disk, T stopped, Z dead; empty where unknown."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_dying(pid: int) -> bool:
    """Whether the kernel is taking a process down, or has, and nobody has asked yet how it ended.
    To free what it held can take seconds, and its peers hear of its death before its parent."""
    fields = _stat(pid)
    return bool(fields) and bool(int(fields[6]) & _EXITING)


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used; 0 where unknown."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def runqueue_seconds(pid: int) -> float:
    """The time for which a process was ready to run and had no processor; 0 where unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def oom_kills() -> int:
    """How many processes of our group the kernel has killed for memory, as far as it tells."""
    try:
        lines = _MEMORY_EVENTS.read_text(encoding="ascii").splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before it may hold anything


def _main_thread(text: str) -> str:
    """faulthandler writes the main thread last."""
    last = text.strip().rpartition("\n\n")[2].splitlines()
    return "\n".join(last[: 1 + _STACK_LINES])
