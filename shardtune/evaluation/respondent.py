"""Who answers a task's questions: the protocol between benchmarks and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class TaskQuestion:
    """What is asked: a text to go on with, or a conversation that the chat template frames."""

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    """With `role` and `content`; empty where `text` is to be continued as it is."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions that the template is told of, as JSON schemas."""


@dataclass(frozen=True)
class AnswerLimits:
    """Where an answer ends, and how it is drawn; greedy at temperature 0."""

    max_new_tokens: int = 256
    stop_strings: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class OptionScore:
    """How probable a model finds an option after its question."""

    log_likelihood: float
    tokens: int


@dataclass(frozen=True)
class TextLoss:
    """Summed negative log-likelihood of a text, and the tokens that were predicted."""

    loss: float
    tokens: int


class Respondent(Protocol):
    """A model that can be asked."""

    @property
    def has_template(self) -> bool:
        """Whether it was made for conversations."""

    def answer(self, questions: Sequence[TaskQuestion], limits: AnswerLimits) -> list[str]:
        """One answer a question, in their order."""

    def score_options(self, pairs: Sequence[tuple[str, str]]) -> list[OptionScore]:
        """Log-likelihood of each option after its context."""

    def score_texts(self, texts: Sequence[str]) -> list[TextLoss]:
        """Loss of whole texts."""

    def share(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Found]]
    ) -> list[Found]:
        """What `work` makes of the items (JSON values), in their order. Ranks that ask together do
        a part of it each, and all get the whole."""
