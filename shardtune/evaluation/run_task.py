"""Asks a model the questions of a task, and scores what it says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardtune.evaluation.answer_metrics import (
    ChoiceMetric,
    Code,
    Regex,
    best_option,
    require_packages,
)
from shardtune.evaluation.confidence import Interval, interval, paired_difference
from shardtune.evaluation.pattern_search import Found
from shardtune.evaluation.respondent import Respondent
from shardtune.evaluation.sandbox import require_no_network, run_code
from shardtune.evaluation.task import Task
from shardtune.evaluation.task_rows import TaskRow

_PROGRAMS_AT_ONCE = 2
TIMEOUT = "timeout"
"""How the detail of an answer begins whose code or search took too long."""


@dataclass(frozen=True)
class RowScore:
    """One answer and its score."""

    row: int
    question: str
    answer: str
    reference: str
    score: float
    detail: str = ""


@dataclass(frozen=True)
class TaskResult:
    """What became of a task."""

    task: str
    metric: str
    rows: tuple[RowScore, ...]
    seconds: float

    @property
    def scores(self) -> list[float]:
        return [row.score for row in self.rows]

    @property
    def interval(self) -> Interval:
        return interval(self.scores)


@dataclass(frozen=True)
class Comparison:
    """One task before and after training; `before` is None where there is only one model."""

    after: TaskResult
    before: TaskResult | None = None

    @property
    def difference(self) -> Interval | None:
        """The change, row by row."""
        if self.before is None:
            return None
        return paired_difference(self.before.scores, self.after.scores)


def require_measurable_task(task: Task) -> None:
    """Tries the packages and namespaces that a task will need, before a model is loaded."""
    require_packages(task.metric)
    if isinstance(task.metric, Code):
        require_no_network()


def run_task(task: Task, rows: Sequence[TaskRow], respondent: Respondent) -> TaskResult:
    """Every row is asked once. The rows are those of `open_rows`, for this respondent's template:
    a task that runs often reads its file once."""
    begun = time.monotonic()
    if isinstance(task.metric, ChoiceMetric):
        scores = _choose(task, task.metric, rows, respondent)
    else:
        answers = respondent.answer([row.question for row in rows], task.limits)
        scores = _score(task, rows, answers, respondent)
    return TaskResult(task.name, task.metric.type, tuple(scores), time.monotonic() - begun)


def _score(
    task: Task, rows: Sequence[TaskRow], answers: Sequence[str], respondent: Respondent
) -> list[RowScore]:
    metric = task.metric
    if isinstance(metric, Code):
        return _run_programs(metric, rows, answers, respondent)
    if isinstance(metric, Regex):
        return _search(metric, rows, answers, respondent)
    assert not isinstance(metric, ChoiceMetric)
    return [
        _row_score(row, answer, metric.score(answer, row.reference))
        for row, answer in zip(rows, answers, strict=True)
    ]


def _row_score(row: TaskRow, answer: str, score: float, detail: str = "") -> RowScore:
    asked = row.question.messages[-1]["content"] if row.question.messages else row.reference.prompt
    return RowScore(row.number, asked, answer, " | ".join(row.reference.answers), score, detail)


def _choose(
    task: Task, metric: ChoiceMetric, rows: Sequence[TaskRow], respondent: Respondent
) -> list[RowScore]:
    """Each option is scored after its question; the likeliest is the answer."""
    pairs = [
        (row.context, task.before_answer + option)
        for row in rows
        for option in row.reference.choices
    ]
    found = iter(respondent.score_options(pairs))
    scores = []
    for row in rows:
        options = row.reference.choices
        each = [next(found) for _ in options]
        sizes = {
            "none": [1] * len(options),
            "characters": [len(option) for option in options],
            "bytes": [len(option.encode()) for option in options],
            "tokens": [score.tokens for score in each],
        }[metric.normalize]
        values = [
            score.log_likelihood / max(size, 1) for score, size in zip(each, sizes, strict=True)
        ]
        chosen = options[best_option(values)]
        detail = " ".join(f"{score.log_likelihood:.6f}" for score in each)
        scores.append(_row_score(row, chosen, float(chosen in row.reference.answers), detail))
    return scores


def _search(
    metric: Regex, rows: Sequence[TaskRow], answers: Sequence[str], respondent: Respondent
) -> list[RowScore]:
    """Ranks search a part of the answers each, so that all know the same of one that took long."""
    late = f"{TIMEOUT} the pattern was not done after {metric.seconds:g} s"
    found = [
        Found(*each) if each else None for each in respondent.share(list(answers), metric.search)
    ]
    return [
        _row_score(row, answer, metric.score(each, row.reference), "" if each else late)
        for row, answer, each in zip(rows, answers, found, strict=True)
    ]


def _run_programs(
    metric: Code, rows: Sequence[TaskRow], answers: Sequence[str], respondent: Respondent
) -> list[RowScore]:
    require_no_network()

    def outcome(program: tuple[str, str]) -> tuple[str, str]:
        result = run_code(*program, seconds=metric.seconds, memory_mib=metric.memory_mib)
        return result.outcome, result.detail

    def run(programs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        with ThreadPoolExecutor(_PROGRAMS_AT_ONCE) as pool:
            return list(pool.map(outcome, programs))

    programs = [
        (metric.program(answer, row.reference), row.reference.tests)
        for row, answer in zip(rows, answers, strict=True)
    ]
    return [
        _row_score(row, answer, float(ended == "passed"), f"{ended} {detail}".strip())
        for row, answer, (ended, detail) in zip(
            rows, answers, respondent.share(programs, run), strict=True
        )
    ]
