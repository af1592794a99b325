"""The logs of a run, as lines of JSON: metrics.jsonl and trace.jsonl."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtune.core.files.atomic_write import DISK_FULL, atomic_write
from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.runs.metrics import MetricsLine
from shardtune.core.runs.run_report import TaskFigures


@dataclass(frozen=True)
class RunLogs:
    """Appends lines and reads them again. Only a rank that `writes` leaves any."""

    metrics: Path
    trace: Path
    writes: bool = True
    waiting: dict[Path, bytes] = field(default_factory=dict, compare=False, repr=False)
    """Lines for which there was no room on the disk."""

    def clear(self) -> None:
        """Begins both files anew."""
        for log in (self.metrics, self.trace):
            log.unlink(missing_ok=True)

    def log(self, line: MetricsLine) -> None:
        """Adds a line to the metrics; a crash loses at most the line being written."""
        if self.writes:
            self._append(self.metrics, line.to_json(ascii_only=True))

    def log_trace(self, line: Mapping[str, str | int]) -> None:
        """Adds a line to the trace."""
        if self.writes:
            self._append(self.trace, json.dumps(line))

    def sync(self) -> None:
        """Puts the lines on the disk: a checkpoint must not be there without those before it.
        OSError if there is no room for them."""
        if self.writes:
            for log in (self.metrics, self.trace):
                self._flush(log)
                if log.exists():
                    with log.open("rb") as file:
                        os.fsync(file.fileno())

    def _append(self, log: Path, line: str) -> None:
        """A disk that is full, maybe only until a checkpoint is through, is no reason to lose a
        step: its line waits for the next."""
        self.waiting[log] = self.waiting.get(log, b"") + f"{line}\n".encode()
        try:
            self._flush(log)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise

    def _flush(self, log: Path) -> None:
        if log in self.waiting:
            _add_whole(log, self.waiting[log])
            del self.waiting[log]

    def forget_after(self, step: int) -> None:
        """Drops the lines of steps that a resumed run will take again, and those that can't be
        read."""
        if self.writes:
            for log in (self.metrics, self.trace):
                if log.exists():
                    found, _ = _records(log)
                    kept = [line for line, record in found if record["step"] <= step]
                    atomic_write(log, "".join(f"{line}\n" for line in kept))

    def unreadable(self) -> dict[str, int]:
        """How many lines of each file can't be read, where there are any. A crash can leave one
        that isn't complete; more come from elsewhere."""
        counted = {log.name: _records(log)[1] for log in (self.metrics, self.trace)}
        return {name: count for name, count in counted.items() if count}

    def evaluations(self, step: int) -> dict[str, EvalFigures]:
        """The figures of each held-out set after `step` steps."""
        found: dict[str, EvalFigures] = {}
        for record in self._of_kind("evaluation"):
            if record["step"] == step:
                with suppress(KeyError, TypeError, ValueError):
                    figures = {key: record[key] for key in EvalFigures.model_fields}
                    found[str(record["set"])] = EvalFigures(**figures)
        return found

    def tasks(self, step: int) -> dict[str, TaskFigures]:
        """The figures of each task after `step` steps."""
        found: dict[str, TaskFigures] = {}
        for record in self._of_kind("task"):
            if record["step"] == step:
                with suppress(KeyError, TypeError, ValueError):
                    figures = {key: record[key] for key in TaskFigures.model_fields}
                    found[str(record["task"])] = TaskFigures(**figures)
        return found

    def task_seconds(self, task: str) -> float:
        """What a task has taken so far."""
        return sum(
            float(each["seconds"])
            for each in self._of_kind("task")
            if each.get("task") == task and isinstance(each.get("seconds"), int | float)
        )

    def epochs(self) -> float:
        """How many epochs were behind after the last step that is in the metrics."""
        steps = [each["epoch"] for each in self._of_kind("step") if "epoch" in each]
        return float(steps[-1]) if steps and isinstance(steps[-1], int | float) else 0.0

    def last_step(self) -> int:
        """The last step that is in the metrics; 0 where none is."""
        return max((int(each["step"]) for each in self._of_kind("step")), default=0)

    def _of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        found, _ = _records(self.metrics)
        return (record for _, record in found if record.get("kind") == kind)


def _records(log: Path) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Each line with what it says, and the number of those that say nothing we understand."""
    if not log.is_file():  # to open a named pipe would wait for somebody who writes
        return [], 0
    lines = log.read_bytes().decode(errors="replace").split("\n")
    found, bad = [], int(bool(lines.pop()))  # a crash may have left a line without an end
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append((line, record))
        else:
            bad += 1
    return found, bad


def _add_whole(log: Path, data: bytes) -> None:
    """Adds all of it or, where that fails, nothing."""
    with log.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise
