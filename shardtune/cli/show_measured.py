"""What `evaluate` shows and writes: tables, a line on forgetting, a document, a radar plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from shardtune.cli.measured_sides import MeasuredSide
from shardtune.core.files.atomic_write import atomic_write
from shardtune.evaluation.comparison_table import as_document, draw_comparisons
from shardtune.evaluation.forgetting import describe_forgetting
from shardtune.evaluation.harness import draw_harness
from shardtune.evaluation.judge import (
    Grade,
    JudgedQuestion,
    PairVerdict,
    compare_pairs,
    grade,
)
from shardtune.evaluation.judge_client import JudgeClient
from shardtune.evaluation.judge_report import by_category, draw_grades, draw_pairs, radar
from shardtune.evaluation.run_task import Comparison


@dataclass(frozen=True)
class Judgement:
    """What the judge has found so far; empty where nobody judged."""

    grades: list[Grade] = field(default_factory=list)
    pairs: list[PairVerdict] = field(default_factory=list)


def judge_answers(
    questions: Sequence[JudgedQuestion],
    before: MeasuredSide | None,
    after: MeasuredSide,
    judge: JudgeClient,
    mode: Literal["single", "pairwise", "both"],
    found: Judgement,
) -> None:
    """Grades of each side, and pairs where there are two. They are added to `found` as they come:
    a judge that fails at last has said what it has said."""
    if mode != "pairwise" or before is None:
        if before is not None:
            for each in grade(questions, before.answers, "before", judge.ask):
                found.grades.append(each)
        for each in grade(questions, after.answers, "after", judge.ask):
            found.grades.append(each)
    if mode != "single" and before is not None:
        for pair in compare_pairs(questions, before.answers, after.answers, judge.ask):
            found.pairs.append(pair)


def show(before: MeasuredSide | None, after: MeasuredSide) -> None:
    """What was measured, for people."""
    console = _console()
    if after.tasks:
        console.print(draw_comparisons(_comparisons(before, after)))
    if after.harness:
        console.print(draw_harness(after.harness, before.harness if before else ()))
    if after.general:
        console.print(describe_forgetting(before.general if before else None, after.general))


def show_judgement(judged: Judgement) -> None:
    """What a judge found."""
    console = _console()
    if judged.grades:
        console.print(draw_grades(judged.grades))
    if judged.pairs:
        console.print(draw_pairs(judged.pairs))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def write(
    path: Path, model: str, before: MeasuredSide | None, after: MeasuredSide, judged: Judgement
) -> None:
    """Every question, answer, score and verdict as JSON, and grades as a radar plot beside it."""
    document: dict[str, Any] = {
        "model": model,
        "tasks": [as_document(each) for each in _comparisons(before, after)],
        "harness": _sides(before, after, lambda side: [asdict(each) for each in side.harness]),
        "general_loss": _sides(
            before, after, lambda side: side.general.mean if side.general else None
        ),
        "answers": _sides(before, after, lambda side: side.answers),
        "grades": [asdict(each) for each in judged.grades],
        "pairs": [asdict(each) for each in judged.pairs],
    }
    atomic_write(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}: every question, answer and score")
    if judged.grades:
        sides = [side for side in ("before", "after") if by_category(judged.grades, side)]
        means = {
            side: {
                name: sum(scores) / len(scores)
                for name, scores in by_category(judged.grades, side).items()
            }
            for side in sides
        }
        picture = path.with_suffix(".svg")
        atomic_write(picture, radar(means))
        print(f"wrote {picture}: mean grades by category")


def _comparisons(before: MeasuredSide | None, after: MeasuredSide) -> list[Comparison]:
    if before is None:
        return [Comparison(each) for each in after.tasks]
    return [Comparison(new, old) for new, old in zip(after.tasks, before.tasks, strict=True)]


def _sides(before: MeasuredSide | None, after: MeasuredSide, read: Any) -> dict[str, Any]:
    return {"before": read(before) if before else None, "after": read(after)}
