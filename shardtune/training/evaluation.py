"""Looks at the held-out sets: losses of all of them, answers to a few of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from shardtune.config.job import EvaluateSection
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


class HeldOut(Protocol):
    """A tokenized set: its name, its documents by number, and whether they are pairs."""

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def paired(self) -> bool: ...


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

    def losses(self) -> list[EvalResult]:
        """One result a held-out set, over all ranks."""
        return [self.engine.evaluate(each.name, self.batches(each.name)) for each in self.sets]

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

    def answers(self) -> list[str]:
        """What the model says now to each prompt, greedily."""
        if not self.prompts:
            return []
        return generate_answers(
            self.engine.module(),
            self.tokenizer,
            [prompt.ids for prompt in self.prompts],
            stops=self.stops,
            max_new_tokens=self.section.max_new_tokens,
            device=self.device,
        )
