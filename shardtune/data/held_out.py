"""A share of the training sets that is held out for evaluation, drawn by the rows' content.

A row is held out if a hash of what it says is below the share. So the draw is the same when rows
are added or reordered, under another tokenizer and another sequence length, and equal rows of one
or several sets lie on one side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardtune.data.validate import CheckedSource

HASHES = 1 << 64


def hold_out(sets: Sequence[CheckedSource], share: float) -> list[NDArray[np.bool_]]:
    """Which documents of each set are held out; raises DataError where a side would be empty."""
    limit = np.uint64(int(share * HASHES))
    held = [each.index.contents < limit for each in sets]
    while _return_twins(sets, held):
        pass
    rows = sum(len(np.unique(each.index.contents)) for each in sets)
    if not any(mask.any() for mask in held):
        fact = f"a share of {share:g} of {rows:,} different rows holds out none"
        raise DataError(Problem("data.eval", fact, "give a larger share, or a set of its own"))
    emptied = [each.path for each, mask in zip(sets, held, strict=True) if mask.all()]
    if emptied:
        fact = f"a share of {share:g} leaves nothing to train of {', '.join(emptied)}"
        raise DataError(Problem("data.eval", fact, "give a smaller share, or a set of its own"))
    return held


def _return_twins(sets: Sequence[CheckedSource], held: list[NDArray[np.bool_]]) -> bool:
    """Gives rows back to training of which a document stands there, too: two rows may differ only
    in what was cut off, or share a stretch where they were split. Whether there were any."""
    trained = np.concatenate(
        [each.index.digests[~mask, 0] for each, mask in zip(sets, held, strict=True)]
    )
    found = False
    for each, mask in zip(sets, held, strict=True):
        twins = mask & np.isin(each.index.digests[:, 0], trained)
        if twins.any():
            mask &= ~np.isin(each.index.contents, each.index.contents[twins])
            found = True
    return found
