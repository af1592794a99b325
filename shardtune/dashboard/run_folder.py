"""Finds the runs in a folder, by their sealed markers. No link is followed.

A run is addressed by a digest of its name: what an address says can lead nowhere else. A folder may
be shared, with names and links that somebody else chose.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.checkpoint.run_marker import MARKER_FILE, RUN_FILES, RUN_FOLDERS, read_marker
from shardtune.errors import RunError

DEEPEST = 5  # folders below the one that is shown
MOST_ENTRIES = 50_000  # that are looked at: it may be somebody's whole disk
SEARCH_REST = 10.0  # times the seconds that a search took, before the next


@dataclass(frozen=True)
class FoundRun:
    """Where a run lies."""

    id: str
    name: str
    """The path below the folder; what isn't UTF-8 in it is escaped."""
    path: Path


@dataclass(frozen=True)
class FoundRuns:
    """The runs by their ids, in the order of their names, and what was passed over."""

    runs: Mapping[str, FoundRun] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class RunFolder:
    """The folder that is shown. It is searched again when the last search is old enough."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._found, self._due = FoundRuns(), 0.0

    def runs(self) -> FoundRuns:
        with self._lock:
            begun = time.monotonic()
            if begun >= self._due:
                self._found = self._search()
                self._due = (now := time.monotonic()) + SEARCH_REST * min(now - begun, 1.0)
            return self._found

    def find(self, id: str) -> FoundRun | None:
        """The run, if it is still there and no link has taken the place of a folder or file."""
        run = self._found.runs.get(id) or self.runs().runs.get(id)
        if run is None or os.path.realpath(run.path) != str(run.path):
            return None
        with suppress(OSError):  # where we may not look any more
            if (run.path / MARKER_FILE).is_file() and not linked(run.path):
                return run
        return None

    def _search(self) -> FoundRuns:
        runs, notes, left = dict[str, FoundRun](), list[str](), MOST_ENTRIES
        waiting = [(self.root, 0)]
        while waiting and left > 0:
            folder, depth = waiting.pop()
            entries = list(_entries(folder))
            left -= len(entries) + 1
            if any(entry.name == MARKER_FILE for entry in entries):
                run, note = self._run(folder)
                if run is not None:
                    runs[run.id] = run
                notes += [note] if note else []
                continue
            for entry in entries:
                with suppress(OSError):  # a circle of links, or one to where we may not look
                    if entry.is_symlink():
                        if entry.is_dir():
                            notes.append(f"{self._name(Path(entry.path))} is a link: not followed")
                    elif entry.is_dir() and not entry.name.startswith(".") and depth < DEEPEST:
                        waiting.append((Path(entry.path), depth + 1))
        if waiting:
            notes.append(f"only the first {MOST_ENTRIES:,} entries were searched")
        ordered = sorted(runs.values(), key=lambda run: run.name)
        return FoundRuns({run.id: run for run in ordered}, tuple(notes))

    def _run(self, folder: Path) -> tuple[FoundRun | None, str]:
        """The run in a folder that has the file of a marker, or why it isn't shown."""
        name = self._name(folder)
        try:
            if link := linked(folder):
                return None, f"{name}: {link} is a link, which no run of ours has"
            if read_marker(folder) is None:
                return None, ""
        except RunError as error:
            return None, f"{name}: {error.problems[0].fact}"
        except OSError as error:
            return None, f"{name}: can't be read: {error.strerror}"
        id = hashlib.sha256(os.fsencode(folder.relative_to(self.root))).hexdigest()[:16]
        return FoundRun(id, name, folder), ""

    def _name(self, folder: Path) -> str:
        below = folder.relative_to(self.root)
        return printable(Path(self.root.name) if below == Path() else below)


def printable(path: Path) -> str:
    """A path as text; what isn't UTF-8 in it is escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def linked(run: Path) -> str:
    """The first of a run's own files and folders that is a link; empty where none is."""
    names = (MARKER_FILE, *RUN_FILES, *RUN_FOLDERS)
    return next((name for name in names if (run / name).is_symlink()), "")


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What lies in a folder; nothing where it can't be read, or is gone."""
    try:
        with os.scandir(folder) as found:
            yield from found
    except OSError:
        return
