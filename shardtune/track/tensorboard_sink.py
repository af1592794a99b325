"""The sink of TensorBoard: curves as scalars; notes, tables and the job as texts."""

from __future__ import annotations

import time as clock
from collections.abc import Mapping, Sequence

from shardtune.config.trackers import TensorBoard
from shardtune.track.event_file import EventFile
from shardtune.track.sink import Cell, TrackedRun, folder_id, own_folder


class TensorBoardSink:
    """One event file for each time that the run is opened, all in one folder."""

    def __init__(self, section: TensorBoard, run: TrackedRun) -> None:
        folder = own_folder(section.directory, section.name, run)
        self.id = folder_id(folder, run)
        self._file = EventFile(folder, None if run.id is None else run.next_step)
        if run.id is None:
            rows = [(key, str(value)) for key, value in run.config.items()]
            self.table(0, "job", ("key", "value"), rows)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._file.scalars(step, values, time)

    def note(self, step: int, name: str, text: str) -> None:
        self._file.text(step, name, text, clock.time())

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
    ) -> None:
        self._file.text(step, name, markdown_table(columns, rows), clock.time())

    def flush(self) -> None:
        self._file.flush()

    def close(self, *, finished: bool) -> None:
        self._file.close()


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table in Markdown. What would end a cell is written otherwise."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, line))} |" for line in lines)


def _markdown_cell(cell: Cell) -> str:
    text = "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
