"""Looks at the held-out sets: losses of all of them, answers to a few of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from shardtune.config.job import EvaluateSection
from shardtune.core.runs.run_report import TaskFigures
from shardtune.core.step import EvalResult, MicroBatch
from shardtune.models.generate import (
    Prompt,
    generate_answers,
    held_out_prompt,
    question_text,
    source_prompt,
)

if TYPE_CHECKING:
    from shardtune.core.engine import Engine


PiecesDone = Callable[[int, int], None]
"""Told how many pieces of some work are done, and of how many; of 0 if nobody knows."""


def _nobody(done: int, total: int) -> None:
    """Nobody wants to know."""


class HeldOut(Protocol):
    """A tokenized set: its name, its documents by number, and whether they are pairs."""

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def paired(self) -> bool: ...


@dataclass(frozen=True)
class Evaluation:
    """What was found at one step; empty where nothing was due."""

    sets: Sequence[EvalResult] = ()
    tasks: Mapping[str, TaskFigures] = field(default_factory=dict)
    """By name."""


@dataclass(frozen=True)
class Question:
    """A held-out prompt and the answer that the data gives."""

    prompt: str
    reference: str


@dataclass(frozen=True)
class Evaluator:
    """Judges the model that an engine holds. Every rank has to ask: the model may be spread."""

    engine: Engine
    sets: Sequence[HeldOut]
    batches: Callable[[str], Iterable[MicroBatch]]
    tokenizer: Any
    stops: frozenset[int]
    section: EvaluateSection
    device: str = "cpu"

    def losses(self, progress: PiecesDone = _nobody) -> list[EvalResult]:
        """One result a held-out set, over all ranks. `progress` hears of each micro-batch."""
        batches = {each.name: self.batches(each.name) for each in self.sets}
        total = sum(len(each) for each in batches.values() if isinstance(each, Sized))
        done = count()

        def told(batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
            for batch in batches:
                progress(next(done), total)
                yield batch

        return [self.engine.evaluate(name, told(each)) for name, each in batches.items()]

    @cached_property
    def prompts(self) -> list[Prompt]:
        """A few held-out prompts, spread over the first set from its beginning to its end."""
        if not self.sets or not self.section.samples:
            return []
        rows, paired = self.sets[0].rows, self.sets[0].paired
        count = min(self.section.samples, len(rows))
        chosen = [rows[index * len(rows) // count] for index in range(count)]
        cut = source_prompt if paired else held_out_prompt
        return [cut(row["input_ids"], row["trained"]) for row in chosen]

    def questions(self) -> list[Question]:
        """Each prompt and the answer that the data gives, as text."""
        return [
            Question(
                prompt=question_text(self.tokenizer, prompt.ids),
                reference=self.tokenizer.decode(prompt.reference, skip_special_tokens=True),
            )
            for prompt in self.prompts
        ]

    def answers(self, progress: PiecesDone = _nobody) -> list[str]:
        """What the model says now to each prompt, greedily. `progress` hears of each token."""
        if not self.prompts:
            return []
        return generate_answers(
            self.engine.module(),
            self.tokenizer,
            [prompt.ids for prompt in self.prompts],
            stops=self.stops,
            max_new_tokens=self.section.max_new_tokens,
            device=self.device,
            progress=progress,
        )
