"""Run directories for tests of trackers: as a run leaves them, without a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shardtune.checkpoint.run_dir import RunDir
from shardtune.core.runs.metrics import CurveWarning, LossSpike, MetricsLine, TaskMetrics
from tests.jobs import make_environment, make_job
from tests.reports import evaluation_line, make_report, step_line

RUN = "a" * 16
SPIKE = LossSpike(kind="spike", step=3, fact="loss 9 after 1", usual=1.0, samples=("a:1",))
TASK = TaskMetrics(
    kind="task", step=3, task="sums", metric="exact", score=0.5, low=0.4, high=0.6, rows=9,
    seconds=2.0,
)  # fmt: skip
WARNINGS = [
    CurveWarning(kind="warning", step=3, about="overfitting", fact=f"{name} rises", set=name)
    for name in ("held", "other")
]


def step_lines(first: int, last: int) -> list[MetricsLine]:
    """Steps with a loss that no other has, and an evaluation after each fifth."""
    found: list[MetricsLine] = []
    for step in range(first, last + 1):
        found.append(step_line(step, loss=3.0 / step, learning_rate=1e-3 / step))
        if step % 5 == 0:
            found.append(evaluation_line(step, "held", 2.0 / step))
    return found


def append(folder: Path, lines: Sequence[MetricsLine]) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(line.to_json(ascii_only=True) + "\n" for line in lines)


def begin_run(folder: Path, steps: int = 12) -> Path:
    """A run that has done so many steps, and of which there is much to say at the third."""
    job = make_job(data={"eval": [{"path": "held.jsonl", "format": "completion"}]})
    RunDir(folder).begin(job, make_environment(RUN))
    append(folder, [evaluation_line(0, "held", 2.5), *step_lines(1, 3), SPIKE, TASK, *WARNINGS])
    append(folder, step_lines(4, steps))
    return folder


def end_run(folder: Path, steps: int = 12) -> Path:
    """The same, come to its end."""
    report = make_report()
    training = report.training.model_copy(update={"step": steps})
    RunDir(folder).write_report(report.model_copy(update={"training": training}))
    return folder


def points(folder: Path) -> dict[str, dict[int, float]]:
    """Every point that a tracker has to hold: by the name of its curve the values by step, read
    from metrics.jsonl as anybody would."""
    found: dict[str, dict[int, float]] = {}
    for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        prefixes = {"evaluation": f"eval/{line.get('set')}", "task": f"task/{line.get('task')}"}
        prefix = {"step": "train", **prefixes}.get(line["kind"])
        for key, value in line.items() if prefix else ():
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
                found.setdefault(f"{prefix}/{key}", {})[line["step"]] = value
    return found
