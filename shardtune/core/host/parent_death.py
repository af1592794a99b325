"""No process outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1


def die_with_parent(parent: int) -> None:
    """A parent that is killed can't clean up; on Linux the kernel does it for us."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
