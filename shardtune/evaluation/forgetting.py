"""Forgetting: the loss on a small set of general texts, before and after fine-tuning.

The texts ship with the package: facts, tales, letters, sums, code and dialogues in plain English,
written for this purpose. A model that was tuned for one thing should not lose much on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardtune.evaluation.confidence import Interval, paired_difference
from shardtune.evaluation.respondent import Respondent, TextLoss

TEXTS = Path(__file__).parent / "data" / "general_text.txt"
PARAGRAPHS = 4
"""Of the file, that make one text: long enough to have a context."""


@dataclass(frozen=True)
class GeneralLoss:
    """Loss on the general texts, in nats per token."""

    texts: tuple[TextLoss, ...]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.texts)

    @property
    def mean(self) -> float:
        return sum(each.loss for each in self.texts) / self.tokens


@cache
def general_texts() -> tuple[str, ...]:
    paragraphs = TEXTS.read_text(encoding="utf-8").strip().split("\n\n")
    return tuple(
        "\n\n".join(paragraphs[begin : begin + PARAGRAPHS])
        for begin in range(0, len(paragraphs), PARAGRAPHS)
    )


def general_loss(respondent: Respondent, texts: Sequence[str] | None = None) -> GeneralLoss:
    """What a model loses on texts that it wasn't tuned for."""
    return GeneralLoss(tuple(respondent.score_texts(texts or general_texts())))


def describe_forgetting(before: GeneralLoss | None, after: GeneralLoss) -> str:
    """One line: both losses and the change with its interval, text by text."""
    if before is None:
        return f"general texts: loss {after.mean:.4f} over {after.tokens} tokens"
    change = forgetting(before, after)
    word = "forgot" if change.low > 0 else "gained" if change.high < 0 else "kept"
    return (
        f"general texts: loss {before.mean:.4f} -> {after.mean:.4f} over {after.tokens} tokens, "
        f"{change.mean:+.4f} [{change.low:+.4f}, {change.high:+.4f}] a token: {word}"
    )


def forgetting(before: GeneralLoss, after: GeneralLoss) -> Interval:
    """The change of the loss per token over the texts; above zero is forgotten."""
    return paired_difference(
        [each.loss / each.tokens for each in before.texts],
        [each.loss / each.tokens for each in after.texts],
    )
