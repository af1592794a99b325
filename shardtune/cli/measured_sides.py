"""Everything that `evaluate` measures, on the result of a run and on the model it began with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardtune.cli.open_model import OpenedModel, open_section
from shardtune.evaluation.forgetting import GeneralLoss, general_loss
from shardtune.evaluation.harness import HarnessFigure, run_harness
from shardtune.evaluation.judge import JudgedQuestion, answer_turns
from shardtune.evaluation.run_task import TaskResult, run_task
from shardtune.evaluation.task import Task
from shardtune.evaluation.task_rows import TaskRow, open_rows

if TYPE_CHECKING:
    from shardtune.training.respondent_model import ModelRespondent


@dataclass(frozen=True)
class Measurement:
    """What is to be measured on each side."""

    tasks: Sequence[Task] = ()
    forgetting: bool = False
    harness: Sequence[str] = ()
    questions: Sequence[JudgedQuestion] = ()
    """For a judge."""
    limit: int | None = None
    shots: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class MeasuredSide:
    """What was found on one side."""

    tasks: list[TaskResult]
    general: GeneralLoss | None = None
    harness: list[HarnessFigure] = field(default_factory=list)
    answers: dict[str, tuple[str, ...]] = field(default_factory=dict)


def measure_sides(
    wanted: Measurement, opened: OpenedModel, asked: ModelRespondent, *, before: bool
) -> tuple[MeasuredSide | None, MeasuredSide]:
    """The model that a run began with (None where there is none, or it isn't wanted), and its
    result."""
    # Read once, so that both sides are asked the same.
    rows = [open_rows(task, has_template=asked.has_template) for task in wanted.tasks]
    after = _measure(wanted, rows, asked)
    if not before or opened.before is None:
        return None, after
    if opened.adapted:
        with opened.as_before():
            return _measure(wanted, rows, asked), after
    # Its answers end where the result's do, and it is asked in the same template.
    opened.model.to("cpu")  # both may not fit on a GPU
    first = open_section(opened.before, opened.precision, opened.device)
    return _measure(wanted, rows, replace(asked, model=first.model)), after


def _measure(
    wanted: Measurement, rows: Sequence[Sequence[TaskRow]], asked: ModelRespondent
) -> MeasuredSide:
    figures: list[HarnessFigure] = []
    if wanted.harness:
        figures, _ = run_harness(
            asked.model,
            asked.tokenizer,
            wanted.harness,
            limit=wanted.limit,
            shots=wanted.shots,
            batch_size=asked.batch_size,
        )
    longest = wanted.max_new_tokens or 1024
    return MeasuredSide(
        [run_task(task, own, asked) for task, own in zip(wanted.tasks, rows, strict=True)],
        general_loss(asked) if wanted.forgetting else None,
        figures,
        answer_turns(wanted.questions, asked, longest) if wanted.questions else {},
    )
