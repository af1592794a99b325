"""What `evaluate` looks at before it loads a model: hours of answers must not end in a typo."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.core.files.regular_file import open_regular
from shardtune.errors import JobError, Problem
from shardtune.evaluation.answer_metrics import needed
from shardtune.evaluation.judge import try_judge
from shardtune.evaluation.run_task import require_measurable_task
from shardtune.evaluation.task_rows import open_rows

if TYPE_CHECKING:
    from shardtune.cli.measured_sides import Measurement
    from shardtune.evaluation.judge_client import JudgeClient


def require_measurable(wanted: Measurement, judge: JudgeClient | None, out: Path | None) -> None:
    """Tries the folder, packages, namespaces, rows and judge that will be needed."""
    if out is not None:
        _require_writable(out)
    if wanted.harness:
        with needed("lm-eval"):
            import lm_eval  # noqa: F401
    for task in wanted.tasks:
        require_measurable_task(task)
        open_rows(task, has_template=True)
    if judge is not None:
        try_judge(judge.ask)


def _require_writable(out: Path) -> None:
    if out.is_dir():
        raise JobError(Problem("--out", f"{out} is a folder", "name a file in it"))
    if out.exists() and not is_measurement(out):
        fact = f"{out} is there already, and no earlier evaluation"
        raise JobError(Problem("--out", fact, "name a file that doesn't exist yet"))
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        fact = f"can't write into {out.parent}: {error.strerror}"
        raise JobError(Problem("--out", fact, "name a file in a folder that is there")) from error


def is_measurement(path: Path) -> bool:
    """Whether it is a file of `evaluate`, which the next may replace."""
    try:
        with open_regular(path) as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"model", "tasks", "answers"} <= found.keys()
