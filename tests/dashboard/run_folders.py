"""Run directories as runs leave them, without the runs; and a server over them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.checkpoint.run_marker import RunMarker, write_marker
from shardtune.core.files.yaml_document import dump_document
from shardtune.dashboard.dashboard_app import Dashboard
from shardtune.web.http_guard import AccessRules
from tests.jobs import make_environment, make_job
from tests.reports import evaluation_line, make_report, step_line
from tests.web_server import behind_socket

LONG_AGO = 1_000_000_000.0


def write_run(
    folder: Path,
    *,
    losses: Any = (3.0, 2.0, 1.0),
    done: bool = True,
    old: bool = True,
    logs: dict[str, str] | None = None,
    **sections: dict[str, Any],
) -> Path:
    """A run of a tiny model; one that is neither `done` nor `old` seems to train."""
    folder.mkdir(parents=True)
    write_marker(folder, RunMarker("a" * 16, begun=True))
    train = {"steps": len(losses) if done else 2 * len(losses)} | sections.pop("train", {})
    job = make_job(train=train, save={"directory": "runs/x"}, **sections)
    (folder / "job.yaml").write_text(dump_document(job.model_dump(mode="json")))
    (folder / "environment.json").write_text(make_environment().to_json())
    lines = [evaluation_line(0, "code", 2.0), *metric_lines(losses)]
    lines.append(evaluation_line(len(losses), "code", 1.0))
    (folder / "metrics.jsonl").write_text("".join(f"{line.to_json()}\n" for line in lines))
    if done:
        (folder / "report.json").write_text(make_report().to_json())
    for name, text in (logs or {}).items():
        path = folder / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if old:
        for path in folder.rglob("*"):
            os.utime(path, (LONG_AGO, LONG_AGO))
    return folder


def metric_lines(losses: Any, first: int = 1) -> list[Any]:
    return [step_line(step, loss=float(loss)) for step, loss in enumerate(losses, first)]


def append_steps(run: Path, first: int, *losses: float) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{line.to_json()}\n" for line in metric_lines(losses, first)))


def write_long_metrics(run: Path, steps: int, spike: int) -> None:
    """Metrics of very many steps, one of which has a loss of 99."""
    start = json.loads(step_line(1).to_json())
    losses = 1 + 4 * np.exp(-np.arange(steps) / (steps / 5))
    losses += np.random.default_rng(0).normal(0, 0.1, steps)
    with (run / "metrics.jsonl").open("w") as file:
        for at in range(steps):
            loss = 99.0 if at + 1 == spike else float(losses[at])
            file.write(json.dumps(start | {"step": at + 1, "loss": loss, "tokens": 4096}) + "\n")


@contextmanager
def serving(root: Path, access: AccessRules | None = None) -> Iterator[str]:
    """The dashboard behind a real socket; gives its address."""
    dashboard = Dashboard(root, access or AccessRules())
    with behind_socket(dashboard.app, draining=dashboard.stop) as address:
        yield address
