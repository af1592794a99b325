"""Modules that have to know where the padding of each row begins."""

from __future__ import annotations

from torch import Tensor


class TakesRowLengths:
    """Marks a module that is told before each forward pass of training and evaluation how many
    tokens each row has, padding not counted. Nobody else tells it, so it takes the lengths once."""

    row_lengths: Tensor | None = None

    def take_row_lengths(self) -> Tensor | None:
        found, self.row_lengths = self.row_lengths, None
        return found
