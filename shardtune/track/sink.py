"""The protocol of a sink: what a tracker's own process writes a run's figures through.

A sink may raise, hang or leak as it likes. It lives in a process of its own, which is watched and
ended by `watch.py`; what it has not been given is read from metrics.jsonl the next time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Protocol, cast

from shardtune.core.tracker import TrackerBase

Cell = str | float | int | None
ConfigValue = str | float | int | bool | None


@dataclass(frozen=True)
class TrackedRun:
    """The run that a sink is opened for."""

    name: str
    """What it is called, where the tracker's section gives no name: the run directory's."""
    folder: Path
    """The sink's own place in the run directory. It is there, and counted by `disk_mib`."""
    id: str | None
    """What `Sink.id` was when the run was opened before; None for one that begins there."""
    next_step: int
    """The first step whose points it may not have yet. After a crash some of them may be there."""
    config: Mapping[str, ConfigValue]
    """The values of the job by their dotted path."""


class Sink(Protocol):
    """Made with the tracker's section and the run: `Sink(section, run)`."""

    @property
    def id(self) -> str:
        """By what the tracker finds this run again, when it is resumed."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Points of curves, by their names; `time` is in seconds since the epoch. Steps never
        fall, and may repeat."""

    def note(self, step: int, name: str, text: str) -> None:
        """A sentence about a step."""

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
    ) -> None:
        """A table: evaluations, or answers before and after."""

    def flush(self) -> None:
        """Returns when what was given is where it survives the process."""

    def close(self, *, finished: bool) -> None:
        """The last call. A run that isn't finished may be resumed."""


def open_sink(section: TrackerBase, run: TrackedRun) -> Sink:
    """The sink that a section names."""
    module, _, name = section.sink.partition(":")
    return cast(Sink, getattr(import_module(module), name)(section, run))


def own_folder(directory: str | None, name: str | None, run: TrackedRun) -> Path:
    """The folder that a sink of files writes to: that of the run as it was opened before, else a
    new one. A folder that is there may be another run's, and is left alone."""
    if run.id is not None:
        return run.folder / run.id
    parent = run.folder if directory is None else Path(directory).expanduser().absolute()
    wanted = name or run.name
    for number in count(1):
        found = parent / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            found.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    return found


def folder_id(found: Path, run: TrackedRun) -> str:
    """`Sink.id` of such a folder: relative where it lies in the run directory, which may move."""
    return found.name if found.parent == run.folder else str(found)
