"""How long a row may be: `train` and the planner refuse what a model has no positions for."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.core.model.shape import ModelShape
from shardtune.errors import ModelError, Problem


def longest_row(shape: ModelShape) -> int | None:
    """Tokens that the model has positions for; None where distances are all that it sees."""
    if shape.positions not in ("rotary", "learned", "sinusoidal"):
        return None
    return shape.max_positions or None


def row_problems(longest: int | None, lengths: Mapping[str, int]) -> list[Problem]:
    """What is wrong with rows of these `lengths`, by their key in the section `data`."""
    return [
        Problem(
            f"data.{key}",
            f"{length} tokens a row, but the model has positions for {longest}",
            f"set data.{key} to at most {longest}",
        )
        for key, length in lengths.items()
        if longest is not None and length > longest
    ]


def require_short_rows(shape: ModelShape, sequence_length: int) -> None:
    """Refuses rows that are longer than the model has positions for."""
    if problems := row_problems(longest_row(shape), {"sequence_length": sequence_length}):
        raise ModelError(problems)
