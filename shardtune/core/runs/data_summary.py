"""The content of `data.json`: what a run trained on, in figures and in a few documents."""

from __future__ import annotations

from typing import Literal

from shardtune.core.record import Record


class TextPiece(Record):
    """A stretch of a document that is trained, or not, as a whole."""

    text: str
    trained: bool
    special: bool = False
    """A special token."""


class DocumentExample(Record):
    """A document as the model sees it; of a long one the beginning."""

    name: str
    tokens: int
    labels: int
    pieces: tuple[TextPiece, ...]
    cut: bool = False
    """Whether there is more of it."""


class DataSetSummary(Record):
    """One data set."""

    side: Literal["train", "eval"]
    name: str
    format: str
    weight: float
    rows: int
    """Rows read, good and bad."""
    documents: int
    tokens: int
    labels: int
    """Trained tokens."""
    ends_trained: int
    """Documents whose last trained token is a stop token."""
    length_p50: int
    length_p95: int
    length_max: int
    lengths: tuple[int, ...]
    """A histogram of the lengths, from 0 to the longest."""
    truncated: int
    truncated_tokens: int
    split: int
    too_long: int
    """Rows left out because they are longer than the sequence."""
    untrained: int
    """Rows left out because no trained token is left in them."""
    unreadable: int
    duplicates: int | None
    """Documents that are there before; null where their digests aren't kept."""
    notes: tuple[str, ...]
    examples: tuple[DocumentExample, ...]


class DataSummary(Record):
    """All data sets of a run."""

    sequence_length: int
    packing: bool
    fill: float
    """The share of a row that is documents and not padding."""
    sets: tuple[DataSetSummary, ...]
    paired: bool = False
    """Whether a document is a source and a target, for a model with an encoder."""
