"""Reports and metrics for tests."""

from __future__ import annotations

from typing import Any

from shardtune.core.runs.metrics import EvaluationMetrics, StepMetrics, TaskMetrics
from shardtune.core.runs.run_report import RunReport


def report_values(**changes: Any) -> dict[str, Any]:
    """A good report, as `Run.finish` writes it, but for what is given."""
    figures = {"loss": 1.5121, "perplexity": 4.536, "accuracy": 0.6574, "labels": 2653}
    after = {"loss": 0.7511, "perplexity": 2.119, "accuracy": 0.8179, "labels": 2653}
    return {
        "finished": True,
        "directory": "runs/quickstart",
        "ranks": 2,
        "training": {
            "step": 40,
            "tokens": 78948,
            "seconds": 326.5,
            "first_loss": 1.5243,
            "last_loss": 0.7725,
            "tokens_per_second": 221.3,
            "utilisation": None,
            "skipped": 0,
            "skipped_in_a_row": 0,
            "stopped": False,
            "preempted": False,
            "peak_memory_gib": 3.1805,
        },
        "evaluation": {"code": {"before": figures, "after": after}},
        "samples": [
            {"prompt": "Add [two] numbers.", "reference": "a + b", "before": "", "after": "[b] + a"}
        ],
        "result": {"path": "runs/quickstart/result", "kind": "lora", "largest_difference": 0.0},
        "forecast": None,
    } | changes


def make_report(**changes: Any) -> RunReport:
    return RunReport.model_validate(report_values(**changes))


def step_line(step: int, **changes: Any) -> StepMetrics:
    values = {
        "kind": "step", "step": step, "loss": 1.0, "grad_norm": 0.5, "learning_rate": 1e-3,
        "tokens": 8, "labels": 4, "applied": True, "busy": None, "seconds": 0.1,
        "tokens_per_second": 80.0, "seconds_left": 1.0, "memory_gib": 0.25, "utilisation": None,
        "epoch": 0.5, "samples_sha256": "0" * 64,
    }  # fmt: skip
    return StepMetrics.model_validate(values | changes)


def evaluation_line(step: int, name: str, loss: float) -> EvaluationMetrics:
    figures = {"loss": loss, "perplexity": 2.0, "accuracy": 0.5, "labels": 7}
    return EvaluationMetrics(kind="evaluation", step=step, set=name, **figures)


def task_line(step: int, name: str, score: float) -> TaskMetrics:
    figures = {"score": score, "low": score - 0.1, "high": score + 0.1, "rows": 9, "seconds": 1.0}
    return TaskMetrics(kind="task", step=step, task=name, metric="accuracy", **figures)
