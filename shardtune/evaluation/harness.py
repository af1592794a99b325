"""lm-evaluation-harness, in this process and on the model as it is loaded: LoRA is not merged."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from shardtune.errors import JobError, Problem
from shardtune.evaluation.answer_metrics import needed
from shardtune.evaluation.confidence import Z95


@dataclass(frozen=True)
class HarnessFigure:
    """One figure of one task, as the harness gives it."""

    task: str
    metric: str
    filter: str
    value: float
    error: float
    """Its standard error; NaN where the harness has none."""
    rows: int


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str | Mapping[str, Any]],
    *,
    limit: int | None = None,
    shots: int | None = None,
    batch_size: int = 16,
) -> tuple[list[HarnessFigure], dict[str, list[dict[str, Any]]]]:
    """The figures of all tasks, and every sample by task. A task is a name of the harness, the path
    of a YAML file in its format, or its settings."""
    with needed("lm-eval"):
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folders = {str(Path(str(task)).parent) for task in tasks if _is_file(task)}
    manager = TaskManager(include_path=sorted(folders) or None)
    names = [_task_name(task) if _is_file(task) else task for task in tasks]
    known = set(manager.all_tasks)
    if missing := [each for each in names if isinstance(each, str) and each not in known]:
        fix = "`lm-eval ls tasks` lists its tasks; a YAML file of your own is named by its path"
        raise JobError(Problem("--harness", f"there is no task {missing[0]!r}", fix))
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal")
    found = simple_evaluate(
        model=wrapped,
        tasks=[dict(each) if isinstance(each, Mapping) else each for each in names],
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=1000,
    )
    if found is None:  # on every rank but the first
        return [], {}
    return _figures(found), dict(found["samples"])


def _figures(found: Mapping[str, Any]) -> list[HarnessFigure]:
    figures = []
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            error = float(error) if isinstance(error, (int, float)) else math.nan
            rows = int(found["n-samples"].get(task, {}).get("effective", 0))
            figures.append(HarnessFigure(task, metric, kind, float(value), error, rows))
    return figures


def draw_harness(after: Sequence[HarnessFigure], before: Sequence[HarnessFigure] = ()) -> Table:
    """Figures with 1.96 standard errors, before and after where both were asked."""
    earlier = {(each.task, each.metric, each.filter): each for each in before}
    table = Table("harness task", "metric", "rows", box=None, pad_edge=False)
    for column in ("before", "after") if before else ("score",):
        table.add_column(column, justify="right")
    for each in after:
        label = each.metric if each.filter == "none" else f"{each.metric} ({each.filter})"
        row = [each.task, label, str(each.rows)]
        if before:
            old = earlier.get((each.task, each.metric, each.filter))
            row.append(_with_error(old) if old else "")
        table.add_row(*row, _with_error(each))
    return table


def _with_error(figure: HarnessFigure) -> str:
    spread = "" if math.isnan(figure.error) else f" ± {Z95 * figure.error:.4f}"
    return f"{figure.value:.4f}{spread}"


def _is_file(task: str | Mapping[str, Any]) -> bool:
    return isinstance(task, str) and task.endswith((".yaml", ".yml"))


def _task_name(task: str | Mapping[str, Any]) -> str:
    """What a YAML file calls its task."""
    text = Path(str(task)).expanduser().read_text(encoding="utf-8")
    found = re.search(r"^task:\s*(\S+)", text, re.MULTILINE)
    if found is None:
        raise JobError(Problem(str(task), "names no task", "write `task: NAME` into it"))
    return found[1]
