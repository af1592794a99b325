"""The figures of one evaluation, as metrics and reports hold them."""

from __future__ import annotations

from shardtune.core.record import Record


class EvalFigures(Record):
    """Figures of one held-out set. Null where a number isn't finite."""

    loss: float | None
    """Mean cross-entropy of the trained tokens."""
    perplexity: float | None
    accuracy: float | None
    """The share of the trained tokens that the model would have chosen itself."""
    labels: int
    """Trained tokens."""
