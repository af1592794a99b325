"""The most memory of its own that a process has had, apart from the files that it maps.

Linux's own mark (VmHWM) counts pages of mapped files too, and how many of those come along with one
that is read differs between kernels.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

WATCH = """
import select, sys
most = 0
print("on", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    with open("/proc/" + sys.argv[1] + "/status") as file:
        most = max(most, int(file.read().split("RssAnon:")[1].split()[0]))
print(most)
"""


@dataclass
class Rise:
    """Bytes above what there was at the start."""

    bytes: int = 0


@contextmanager
def highest_rise() -> Iterator[Rise]:
    """Looks a thousand times a second, from outside: whoever computes doesn't let others look."""
    own = str(Path("/proc/self").resolve().name)
    command = [sys.executable, "-S", "-c", WATCH, own]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        watcher.stdout.readline()
        before = own_memory()
        found = Rise()
        yield found
        watcher.stdin.close()
        found.bytes = int(watcher.stdout.read()) * 1024 - before


def own_memory() -> int:
    """Bytes that this process has, without files."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def rounding(tensors: Iterable[Tensor]) -> int:
    """Bytes that such tensors take beyond their own: torch's allocator on ARM rounds up, 0.7 MiB to
    a whole one."""
    found = list(tensors)
    before = own_memory()
    copies = [each.clone() for each in found]
    return max(0, own_memory() - before - sum(each.nbytes for each in copies))
