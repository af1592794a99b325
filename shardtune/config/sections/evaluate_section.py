"""`evaluate`: when held-out sets and benchmarks are evaluated, and how."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from shardtune.config.sections.field_types import Auto, NotNegative, Positive
from shardtune.core.job_section import Section


class TaskEntry(Section):
    """A benchmark that is run while training, as `shardtune evaluate` runs it afterwards."""

    task: Annotated[str, Field(min_length=1)]
    """What `shardtune evaluate --task` takes: `METRIC=FILE.jsonl`, a task file (`tasks.yaml`), or a
    recipe, as `gsm8k=FILE`."""
    every: Auto | NotNegative = "auto"
    """Steps between two runs of it; 0 runs it only before and after. `auto` follows
    `evaluate.every`."""
    limit: Positive | None = None
    """Ask only the first rows. Null asks all of them."""
    shots: NotNegative | None = None
    """Examples before each question. Null: as the task says."""
    max_new_tokens: Positive | None = None
    """Longest answer. Null: as the task says."""


def _entries(value: object) -> object:
    """A task may be written as its name alone."""
    if not isinstance(value, list | tuple):
        return value
    return tuple({"task": each} if isinstance(each, str) else each for each in value)


class EvaluateSection(Section):
    """When held-out sets and benchmarks are evaluated, and how."""

    every: Auto | NotNegative = "auto"
    """Steps between evaluations; 0 evaluates only before and after the run. `auto` follows
    `save.every`."""
    tasks: Annotated[
        tuple[TaskEntry, ...],
        BeforeValidator(_entries, json_schema_input_type=list[str | TaskEntry]),
    ] = ()
    """Benchmarks that are scored before, during and after training; an entry may be the task's name
    alone. Questions are answered by greedy decoding, in batches, shared among the ranks."""
    batch_size: Positive = 16
    """Questions of a task that a rank answers at once."""
    allow_code: bool = False
    """Run code that the model writes, for tasks whose metric is `code`, in a sandbox."""
    samples: NotNegative = 3
    """Held-out prompts whose answers are shown before and after the run."""
    max_new_tokens: Positive = 96
    """Longest answer to those."""
