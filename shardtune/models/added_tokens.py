"""New tokens: the tokenizer learns them, and embedding and output head grow by a row for each.

A new row starts as the mean of the rows that are there. Its token is then never likelier than a
token is on average, so the model says at first what it said before. A row of random numbers may
point anywhere: it would take probability from the others, and the first steps would undo that.
Nothing is drawn, so every rank, and every way to build the model, starts from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.config.job import ModelSection
from shardtune.errors import ModelError, Problem


def add_tokens(tokenizer: Any, section: ModelSection) -> None:
    """Adds the job's tokens, which a text may contain and which no text is cut inside of."""
    known = tokenizer.get_vocab()
    problems = []
    for index, token in enumerate(section.add_tokens):
        place = f"model.add_tokens.{index}"
        if token in known:
            fact = f"{token!r} is a token of this model already (id {known[token]})"
            problems.append(Problem(place, fact, "leave it out"))
        elif token in section.add_tokens[:index]:
            problems.append(Problem(place, f"{token!r} is named twice", "leave it out once"))
    if problems:
        raise ModelError(problems)
    tokenizer.add_tokens(list(section.add_tokens), special_tokens=True)


@dataclass(frozen=True)
class Growth:
    """What new tokens mean for a model."""

    added: int
    """Tokens that are new."""
    tokens: int
    """Tokens of the tokenizer, with the new ones."""
    before: int
    """Rows of the model's own embedding; many models have more than their tokenizer has tokens."""

    @property
    def rows(self) -> int:
        """Rows that it has to have. It never grows to hide a tokenizer of another model."""
        fitted = self.tokens - self.added <= self.before
        return max(self.before, self.tokens) if fitted else self.before

    def __str__(self) -> str:
        if self.rows == self.before:
            return (
                f"{self.added} new of {self.tokens:,} tokens; the embedding has {self.before:,} "
                "rows, so it stays as it is"
            )
        return (
            f"{self.added} new; the embedding grows from {self.before:,} to {self.rows:,} rows, "
            "each new one the mean of the others"
        )


def grow(model: Any, rows: int) -> None:
    """Lets a whole model's embedding and output head grow to `rows` rows."""
    before = len(model.get_input_embeddings().weight)
    if rows == before:
        return
    with torch.random.fork_rng(devices=[]):  # transformers draws first values; ours replace them
        model.resize_token_embeddings(rows, mean_resizing=False)
    for end in ends(model):
        for parameter in end.parameters():
            parameter.data = grown(parameter.data[:before], rows)


def grown(weight: Tensor, rows: int) -> Tensor:
    """`weight` with rows added up to `rows`, each the mean of its own."""
    # In double precision no order of the additions shows after the rounding.
    mean = weight.mean(0, keepdim=True, dtype=torch.float64).to(weight.dtype)
    return torch.cat([weight, mean.expand(rows - weight.shape[0], *mean.shape[1:])])


def ends(model: Any) -> list[nn.Module]:
    """The input embedding and the output head, where there are both."""
    found = (model.get_input_embeddings(), model.get_output_embeddings())
    return [module for module in found if module is not None]
