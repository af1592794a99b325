"""From metrics.jsonl to a sink: each line once, in order, whatever was sent before.

Lines that a resumed run writes again are those that it had before, to the bit: what was sent stays
as it is, and the rest follows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shardtune.core.files.regular_file import read_regular
from shardtune.core.record import Record
from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.runs.metrics import (
    CurveWarning,
    EvaluationMetrics,
    MetricsLine,
    StepMetrics,
    TaskMetrics,
)
from shardtune.core.runs.metrics_log import LogPosition, follow
from shardtune.core.runs.run_report import RunReport
from shardtune.track.sink import Cell, Sink
from shardtune.track.tracker_state import TrackerState, write_tracker_state

_LARGEST_REPORT = 1 << 24
_REPORT = "report"


class Feed:
    """What one sink gets of one run."""

    def __init__(self, run_dir: Path, label: str, sink: Sink, state: TrackerState) -> None:
        self._run_dir = run_dir
        self._label = label
        self._sink = sink
        self._position = LogPosition()
        self._sent = dict(state.sent)
        self._state = state
        self.lines = 0
        """How many were sent by us."""

    @property
    def id(self) -> str:
        """What the tracker calls the run."""
        return self._state.id

    def send_new(self) -> bool:
        """Sends what the log has gained; False where that is nothing."""
        new = follow(self._run_dir, self._position)
        self._position = new.position
        fresh = [line for line in new.lines if not self._has(line)]
        for line, at in zip(fresh, self._times(fresh), strict=True):
            self._send(line, at)
        if fresh:
            self._flush()
        return bool(new.lines)

    def finish(self) -> None:
        """Sends the rest, and the tables of the report if the run has come to its end."""
        while self.send_new():
            pass
        report = _report(self._run_dir)
        if report is not None and not self._state.has(_REPORT, report.training.step):
            self._send_report(report)
            self._sent[_REPORT] = report.training.step
            self.lines += 1
        self._flush(durable=True)
        self._sink.close(finished=report is not None and report.finished)

    def _has(self, line: MetricsLine) -> bool:
        return self._sent.get(_kind(line), -1) >= line.step

    def _flush(self, *, durable: bool = False) -> None:
        """What is noted as sent has arrived."""
        self._sink.flush()
        self._state = self._state.model_copy(update={"sent": dict(self._sent)})
        write_tracker_state(self._run_dir, self._label, self._state, durable=durable)

    def _times(self, lines: Sequence[MetricsLine]) -> list[float]:
        """When each line was written, about: lines have no clock, but steps tell their seconds, and
        the file tells when the last of them came."""
        at = time.time()
        with suppress(OSError):
            at = min(at, (self._run_dir / "metrics.jsonl").stat().st_mtime)
        found = []
        for line in reversed(lines):
            found.append(at)
            at -= line.seconds if isinstance(line, StepMetrics) else 0.0
        return found[::-1]

    def _send(self, line: MetricsLine, at: float) -> None:
        if isinstance(line, StepMetrics):
            self._sink.log(line.step, _numbers(line, "train"), at)
        elif isinstance(line, EvaluationMetrics):
            self._sink.log(line.step, _numbers(line, f"eval/{line.set}"), at)
        elif isinstance(line, TaskMetrics):
            self._sink.log(line.step, _numbers(line, f"task/{line.task}"), at)
        else:
            about = line.about if isinstance(line, CurveWarning) else line.kind
            self._sink.note(line.step, f"notes/{about}", line.fact)
        self._sent[_kind(line)] = line.step
        self.lines += 1

    def _send_report(self, report: RunReport) -> None:
        step = report.training.step
        figures = [key for key in EvalFigures.model_fields if key != "labels"]
        columns = ["set", *(f"{key} {when}" for key in figures for when in ("before", "after"))]
        rows: list[list[Cell]] = []
        for name, both in report.evaluation.items():
            sides = (both.before, both.after)
            rows.append([name, *(getattr(side, key, None) for key in figures for side in sides)])
        if rows:
            self._sink.table(step, "evaluation", columns, rows)
        tasks: list[list[Cell]] = [
            [name, both.after.metric, getattr(both.before, "score", None), both.after.score]
            for name, both in report.tasks.items()
        ]
        if tasks:
            self._sink.table(step, "tasks", ["task", "metric", "before", "after"], tasks)
        answers = [[s.prompt, s.reference, s.before, s.after] for s in report.samples]
        if answers:
            self._sink.table(step, "answers", ["prompt", "reference", "before", "after"], answers)


def lacks_nothing(run_dir: Path, state: TrackerState) -> bool:
    """Whether a tracker has all that the run has written so far."""
    found, report = follow(run_dir), _report(run_dir)
    while found.lines:
        if not all(state.has(_kind(line), line.step) for line in found.lines):
            return False
        found = follow(run_dir, found.position)
    return report is None or state.has(_REPORT, report.training.step)


def _kind(line: MetricsLine) -> str:
    """By what lines are counted: there is one of each kind a step."""
    if isinstance(line, EvaluationMetrics):
        return f"{line.kind}/{line.set}"
    if isinstance(line, TaskMetrics):
        return f"{line.kind}/{line.task}"
    if isinstance(line, CurveWarning):
        return f"{line.kind}/{line.about}/{line.set or ''}"
    return line.kind


def _numbers(line: Record, prefix: str) -> Mapping[str, float]:
    """The numbers of a line, by the names of curves. Null is no number."""
    return {
        f"{prefix}/{key}": value
        for key, value in line
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "step"
    }


def _report(run_dir: Path) -> RunReport | None:
    """Of a run that came to its end."""
    try:
        text = read_regular(run_dir / "report.json", _LARGEST_REPORT)
        return RunReport.model_validate_json(text)
    except (OSError, ValueError):
        return None
