"""The logs of a run, as lines of JSON: metrics.jsonl and trace.jsonl."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtune.core.atomic_write import atomic_write
from shardtune.core.metrics import MetricsLine
from shardtune.core.run_report import EvalFigures


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
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _flush(self, log: Path) -> None:
        if log in self.waiting:
            _add_whole(log, self.waiting[log])
            del self.waiting[log]

    def forget_after(self, step: int) -> None:
        """Drops the lines of steps that a resumed run will take again."""
        if self.writes:
            for log in (self.metrics, self.trace):
                if log.exists():
                    kept = [record for record in _records(log) if record["step"] <= step]
                    atomic_write(log, "".join(json.dumps(record) + "\n" for record in kept))

    def evaluations(self, step: int) -> dict[str, EvalFigures]:
        """The figures of each held-out set after `step` steps."""
        return {
            record["set"]: EvalFigures(**{key: record[key] for key in EvalFigures.model_fields})
            for record in _records(self.metrics)
            if record["kind"] == "evaluation" and record["step"] == step
        }

    def epochs(self) -> float:
        """How many epochs were behind after the last step that is in the metrics."""
        steps = [each for each in _records(self.metrics) if each["kind"] == "step"]
        return float(steps[-1]["epoch"]) if steps else 0.0


def _records(log: Path) -> list[dict[str, Any]]:
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    whole, _, _ = text.rpartition("\n")  # a crash may have left a line without an end
    return [json.loads(line) for line in whole.splitlines()]


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
