"""Packing: which documents share a row.

Both functions take the documents' lengths and return rows of document numbers. A document is never
cut, stands in exactly one row, and a row never holds more than `capacity` tokens. The result
depends on the arguments alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.integer[Any]]


def pack(lengths: Lengths, capacity: int) -> list[list[int]]:
    """Best fit decreasing: the longest document first, each into the fullest row that can take it.

    Documents of one length are taken in the order in which they are given, so that another order
    of the same documents gives other rows (but as many of them, filled alike).
    """
    _check(lengths, capacity)
    rows: list[list[int]] = []
    by_space: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit s is set while by_space[s] has a row: the best fit is one shift away
    for length, group in _groups(lengths):
        at = 0
        while at < len(group):
            if fitting := spaces >> length:
                space = length + (fitting & -fitting).bit_length() - 1
                row = by_space[space].pop()
                if not by_space[space]:
                    spaces ^= 1 << space
            else:
                space = capacity
                rows.append(row := [])
            # Once chosen, the row is the tightest one until this length no longer fits it: all
            # that it can take goes in at once, and the search is paid per visit, not per document.
            taken = group[at : at + space // length]
            row += taken
            at += len(taken)
            space -= len(taken) * length
            if space:
                by_space[space].append(row)
                spaces |= 1 << space
    return rows


def pack_in_order(lengths: Lengths, capacity: int) -> list[list[int]]:
    """Next fit: the documents in their order, a new row whenever the next one doesn't fit."""
    _check(lengths, capacity)
    rows: list[list[int]] = []
    space = 0
    for document, length in enumerate(lengths.tolist()):
        if length > space:
            rows.append([])
            space = capacity
        rows[-1].append(document)
        space -= length
    return rows


def _groups(lengths: Lengths) -> Iterator[tuple[int, list[int]]]:
    """The documents of each length, longest first; within a length in their order."""
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    borders = np.flatnonzero(np.diff(ordered)) + 1
    for group in np.split(order, borders):
        if len(group):
            yield int(lengths[group[0]]), group.tolist()


def _check(lengths: Lengths, capacity: int) -> None:
    """A document that is empty or longer than a row would never find its place."""
    assert not len(lengths) or (lengths.min() > 0 and lengths.max() <= capacity)
