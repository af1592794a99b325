"""The metrics of the runs that somebody looks at, kept in memory and read on from where they end.

A file is followed by its size and identity, not by notices of the kernel: those don't cross a
network file system. It is opened for each look, because that makes NFS ask the server again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardtune.core.runs.metrics_log import LogPosition, read_new_bytes
from shardtune.dashboard.metric_columns import MetricColumns

MOST_OPEN = 16  # runs; the one that was looked at longest ago is forgotten

_Found = TypeVar("_Found")


class OpenRun:
    """One run's metrics, for any number of threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._columns, self._position = MetricColumns(), LogPosition()
        self._restarts = 0

    def version(self) -> tuple[int, int, int]:
        """Reads what is new. Equal versions mean that nothing was."""
        with self._lock:
            self._refresh()
            return self._restarts, self._position.inode, self._position.offset

    def look(self, at: Callable[[MetricColumns], _Found]) -> _Found:
        """What `at` finds in the metrics as they are now."""
        with self._lock:
            self._refresh()
            return at(self._columns)

    def _refresh(self) -> None:
        while True:
            found = read_new_bytes(self._path, self._position)
            if found.restarted:
                self._columns = MetricColumns()
                self._restarts += 1
            self._position = found.position
            if not found.data:
                return
            self._columns.add(found.data)


class OpenRuns:
    """The runs that were looked at last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[Path, OpenRun] = OrderedDict()

    def open(self, path: Path) -> OpenRun:
        with self._lock:
            run = self._runs.setdefault(path, OpenRun(path))
            self._runs.move_to_end(path)
            while len(self._runs) > MOST_OPEN:
                self._runs.popitem(last=False)
            return run
