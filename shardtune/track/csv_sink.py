"""The sink of CSV files: `points.csv` with a row for each point, and a file for each table."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence

from shardtune.config.trackers import CSVFiles
from shardtune.track.sink import Cell, TrackedRun, folder_id, own_folder


class CSVSink:
    """Long form (`step,name,value`): names that appear late add rows, not columns. Spreadsheets and
    pandas (`pivot`) make columns of it."""

    def __init__(self, section: CSVFiles, run: TrackedRun) -> None:
        self._folder = own_folder(section.directory, section.name, run)
        self.id = folder_id(self._folder, run)
        self._points = (self._folder / "points.csv").open("a", newline="", encoding="utf-8")
        self._notes = (self._folder / "notes.csv").open("a", newline="", encoding="utf-8")
        for file, last in ((self._points, "value"), (self._notes, "text")):
            if not file.tell():
                csv.writer(file).writerow(("step", "name", last))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        rows = ((step, name, repr(value)) for name, value in values.items())
        csv.writer(self._points).writerows(rows)

    def note(self, step: int, name: str, text: str) -> None:
        csv.writer(self._notes).writerow((step, name, text))

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
    ) -> None:
        path = self._folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}-{step}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])

    def flush(self) -> None:
        self._points.flush()
        self._notes.flush()

    def close(self, *, finished: bool) -> None:
        self._points.close()
        self._notes.close()
