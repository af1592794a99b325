"""What preparation hands to the loader: tokenized documents and the numbers about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import datasets
    import numpy as np
    from numpy.typing import NDArray

CALIBRATION_SAMPLES = 64
"""Documents, of all data sets together; but one of each at least."""
CALIBRATION_TOKENS = 512
"""Of each, at most."""


@dataclass(frozen=True)
class SourceReport:
    """What became of the rows of one data set."""

    name: str
    path: str
    format: str
    rows_read: int
    """Rows found in the source, good and bad."""
    documents: int
    """Documents that came out of them."""
    tokens: int
    labels: int
    """Tokens that are trained."""
    truncated: int
    """Rows whose end was cut off."""
    truncated_tokens: int
    """Tokens that were cut off so."""
    split: int
    """Rows that were cut into several documents."""
    dropped: int
    """Rows left out because they are longer than the sequence."""
    untrained: int
    """Rows left out because no trained token is left in them."""
    bad: int
    """Rows that couldn't be read."""
    stops_trained: int
    """Documents whose last trained token is a stop token."""
    unit: str = "a row"
    """What of the source a document is."""
    notes: tuple[str, ...] = ()
    """What a person should know about how it was read."""


@dataclass(frozen=True)
class PreparedSet:
    """One data set, tokenized.

    A document is one row of `rows`; its id is `name:index`. `rows` has two columns: `input_ids`
    (list of int32) and `trained` (list of bool, whether the token at that place is learnt; the
    first never is, because nothing stands before it to predict it from).
    """

    name: str
    weight: float
    """How often its documents are seen in an epoch; 1.0 for evaluation sets."""
    rows: datasets.Dataset
    lengths: NDArray[np.int32]
    """Tokens per document."""
    labels: NDArray[np.int32]
    """Trained tokens per document."""
    report: SourceReport
    digest: str = ""
    """Of all that decides the documents: the source's content, the settings, the tokenizer."""
    other_digests: tuple[str, ...] = ()
    """What other versions noted of the same documents."""
    folder: Path | None = None
    """Where its prepared documents lie."""
    checks: NDArray[np.uint64] | None = None
    """The digest of each document, compared when it is read; None for documents of no cache."""
    paired: bool = False
    """Whether a document is a source and a target, of which the target is what is trained."""


@dataclass(frozen=True)
class PreparedData:
    """All data sets of a job."""

    train: tuple[PreparedSet, ...]
    eval: tuple[PreparedSet, ...]

    def digests(self) -> dict[str, str]:
        """The digest of each set, by what it is for and its name."""
        return {name: each.digest for name, each in self._named()}

    def other_digests(self) -> dict[str, tuple[str, ...]]:
        """What a run of another version may have noted instead."""
        return {name: each.other_digests for name, each in self._named()}

    def _named(self) -> list[tuple[str, PreparedSet]]:
        sides = (("train", self.train), ("eval", self.eval))
        return [(f"{side}/{each.name}", each) for side, sets in sides for each in sets]

    def calibration_samples(self) -> list[list[int]]:
        """Calibration samples: token ids of some documents that are trained, from all over the data
        sets and as often as these are seen, the same each time; of long ones the beginning."""
        shares = [each.weight * len(each.rows) for each in self.train]
        found = []
        for each, share in zip(self.train, shares, strict=True):
            count = min(max(1, round(CALIBRATION_SAMPLES * share / sum(shares))), len(each.rows))
            places = (number * len(each.rows) // count for number in range(count))
            found += [each.rows[row]["input_ids"][:CALIBRATION_TOKENS] for row in places]
        return found
