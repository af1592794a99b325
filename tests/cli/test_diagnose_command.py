"""What `shardtune diagnose` reads from a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.cli.diagnose_command import read_facts
from shardtune.core.record import Record
from shardtune.core.runs.metrics import TaskMetrics
from shardtune.core.runs.step_parts import PARTS, RankParts, StepParts
from shardtune.errors import RunError
from tests.jobs import write_job
from tests.reports import step_line


def task_line(step: int, seconds: float) -> TaskMetrics:
    figures = {"metric": "exact_match", "score": 0.5, "low": 0.4, "high": 0.6, "rows": 10}
    return TaskMetrics(kind="task", step=step, task="sums", seconds=seconds, **figures)


def test_tasks_count_where_they_hold_up_steps(tmp_path: Path) -> None:
    """Not those before the first step and after the last."""
    parts = StepParts(steps=1, ranks=(RankParts(**dict.fromkeys(PARTS, 0.1), positions=8),))
    lines: list[Record] = [task_line(0, 100.0)]
    for step in range(1, 6):
        lines.append(step_line(step, parts=parts))
        if step in (2, 4):
            lines.append(task_line(step, 3.0))
    lines.append(task_line(5, 100.0))
    text = "".join(line.to_json(ascii_only=True) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    write_job(tmp_path)
    facts, _ = read_facts(tmp_path)
    assert facts.task_seconds == {"sums": pytest.approx(6.0 / 4)}


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run directory: no such folder"):
        read_facts(tmp_path / "none")
    with pytest.raises(RunError, match=r"is no run directory: no job\.yaml in it"):
        read_facts(tmp_path)
