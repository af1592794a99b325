"""The sampler: the order of documents, a pure function of the seed, the epoch and the step.

Nothing here knows how many ranks there are, so no number of them can change what a step trains on.

A data set of `n` documents is an endless stream: its permutations, one after the other. An epoch
takes the next `weight * n` documents of each stream, mixes them and arranges them in rows. The rows
of all epochs form one endless list again, and step `s` takes the `global_batch` rows from
`s * global_batch` on, across the epochs' borders: no row is dropped and none is repeated to fill a
step. Where a run had come to its end before it was extended, the last step may have been short; the
next one then begins with the row after it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from shardtune.data.packing import Lengths, pack, pack_in_order
from shardtune.errors import DataError, Problem

KEPT_EPOCHS = 2  # a step at a border needs the epoch that ends and the one that begins


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """One tokenized example: which data set, which of its rows, how many tokens."""

    dataset: int
    index: int
    length: int


BatchRow = tuple[DocumentRef, ...]


@dataclass(frozen=True)
class _Epoch:
    """The rows of an epoch, flat: row `r` is the documents `borders[r]` to `borders[r + 1]`."""

    datasets: NDArray[np.int64]
    indices: NDArray[np.int64]
    lengths: NDArray[np.int64]
    borders: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.borders) - 1

    def row(self, number: int) -> BatchRow:
        span = slice(self.borders[number], self.borders[number + 1])
        columns = (self.datasets[span], self.indices[span], self.lengths[span])
        return tuple(map(DocumentRef, *(column.tolist() for column in columns)))


class Sampler:
    """Which rows each step trains on. Safe to ask from several threads."""

    def __init__(
        self,
        lengths: Sequence[Lengths],
        names: Sequence[str],
        weights: Sequence[float],
        *,
        capacity: int,
        packing: bool,
        shuffle: bool,
        seed: int,
        global_batch: int,
        earlier_ends: Sequence[float] = (),
    ) -> None:
        """`lengths[d]` holds the tokens of each document of data set `d`; `earlier_ends` are the
        epochs at which the run had ended before it was extended."""
        self._lengths = [np.asarray(each, dtype=np.int64) for each in lengths]
        self._names = tuple(names)
        # 0.1 means a tenth: a float's rounding would add up to a lost document after some epochs.
        self._weights = [Fraction(str(weight)) for weight in weights]
        self._capacity = capacity
        self._packing = packing
        self._shuffle = shuffle
        self._seed = seed
        self._global_batch = global_batch
        self._check()
        # With whole weights every epoch has the same documents, and how many rows the packing
        # makes of them depends on their lengths alone: one epoch tells the count of all.
        self._alike = all(weight.denominator == 1 for weight in self._weights)
        self._starts = [
            0
        ]  # the first row of each epoch that was counted so far, and the next one's
        self._kept: dict[int, _Epoch] = {}
        self._lock = threading.RLock()
        self._parts = [(0, 0)]  # the first step and the first row of each part of the run
        for end in earlier_ends:
            self._parts.append((self.steps(end), self.count(end)))

    def rows(self, step: int, last: int | None = None) -> tuple[BatchRow, ...]:
        """The rows of a step; with `last`, only those of the first `last` rows of the run."""
        first, end = self._first_row(step), self._first_row(step + 1)
        return tuple(
            self._row(row) for row in range(first, end if last is None else min(end, last))
        )

    def _first_row(self, step: int) -> int:
        """The number of the row that a step begins with."""
        begin, row = max(part for part in self._parts if part[0] <= step)
        return row + (step - begin) * self._global_batch

    def count(self, epochs: float) -> int:
        """How many rows so many epochs have."""
        exact = Fraction(str(epochs))
        whole = floor(exact)
        with self._lock:
            start = self._start(whole)
            if exact == whole:
                return start
            return start + ceil((exact - whole) * (self._start(whole + 1) - start))

    def steps(self, epochs: float) -> int:
        """How many steps so many epochs take; the last one may be short."""
        rows = self.count(epochs)
        begin, row = max(part for part in self._parts if part[1] <= rows)
        return begin + ceil((rows - row) / self._global_batch)

    def epoch(self, step: int, last: int | None = None) -> float:
        """How many epochs are behind when a step begins; `last` is where the rows end, if so."""
        with self._lock:
            rows = self._first_row(step)
            if last is not None and rows >= last:  # the step after the last, which may be short
                number, row = self._locate(last - 1)
                return number + (row + 1) / (self._start(number + 1) - self._start(number))
            number, row = self._locate(rows)
            return number + row / (self._start(number + 1) - self._start(number))

    def fill(self) -> float:
        """The share of the first epoch's row space that holds tokens."""
        with self._lock:
            epoch = self._epoch(self._locate(0)[0])
        return float(epoch.lengths.sum() / (len(epoch) * self._capacity))

    def longest(self, count: int) -> tuple[BatchRow, ...]:
        """So many of the first epoch's rows, those with most tokens."""
        with self._lock:
            epoch = self._epoch(self._locate(0)[0])
        tokens = np.add.reduceat(epoch.lengths, epoch.borders[:-1])
        order = np.argsort(-tokens, kind="stable")[:count]
        return tuple(epoch.row(row) for row in order.tolist())

    def _row(self, number: int) -> BatchRow:
        with self._lock:
            epoch, row = self._locate(number)
            return self._epoch(epoch).row(row)

    def _locate(self, row: int) -> tuple[int, int]:
        """The epoch that a row of the run is in, and its number within that epoch."""
        while self._starts[-1] <= row:
            self._start(len(self._starts))
        epoch = bisect_right(self._starts, row) - 1
        return epoch, row - self._starts[epoch]

    def _start(self, epoch: int) -> int:
        """The number of an epoch's first row. Arranges the epochs before it once, to count them."""
        while len(self._starts) <= epoch:
            if self._alike and len(self._starts) > 1:
                count = self._starts[1]
            else:
                count = len(self._epoch(len(self._starts) - 1))
            self._starts.append(self._starts[-1] + count)
        return self._starts[epoch]

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._kept:
            epoch = self._arrange(number)
            if len(self._kept) == KEPT_EPOCHS:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = epoch
        return self._kept[number]

    def _arrange(self, epoch: int) -> _Epoch:
        """Take an epoch's documents from their streams, mix them and put them into rows."""
        parts = [self._take(dataset, epoch) for dataset in range(len(self._lengths))]
        datasets = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        indices = np.concatenate(parts)
        lengths = np.concatenate(
            [all_of_it[part] for all_of_it, part in zip(self._lengths, parts, strict=True)]
        )
        if self._shuffle:
            mixed = self._permutation(len(indices), "documents", epoch)
            datasets, indices, lengths = datasets[mixed], indices[mixed], lengths[mixed]
        if not self._packing:
            return _Epoch(datasets, indices, lengths, np.arange(len(indices) + 1))

        rows = (pack if self._shuffle else pack_in_order)(lengths, self._capacity)
        if self._shuffle:
            # Packing leaves the longest documents in the first rows and the shortest in the last.
            rows = [rows[row] for row in self._permutation(len(rows), "rows", epoch).tolist()]
        placed = np.array([document for row in rows for document in row], dtype=np.int64)
        borders = np.cumsum([0, *map(len, rows)])
        return _Epoch(datasets[placed], indices[placed], lengths[placed], borders)

    def _take(self, dataset: int, epoch: int) -> NDArray[np.int64]:
        """The documents that an epoch takes from the stream of a data set's permutations."""
        size = len(self._lengths[dataset])
        share = self._weights[dataset] * size
        begin, end = floor(share * epoch), floor(share * (epoch + 1))
        parts = [np.arange(0)]
        while begin < end:
            turn, offset = divmod(begin, size)
            some = self._turn(dataset, turn)[offset : offset + end - begin]
            parts.append(some)
            begin += len(some)
        return np.concatenate(parts)

    def _turn(self, dataset: int, turn: int) -> NDArray[np.int64]:
        """The order in which a data set is gone through for the `turn`-th time."""
        size = len(self._lengths[dataset])
        if not self._shuffle:
            return np.arange(size)
        return self._permutation(size, f"set {self._names[dataset]}", turn)

    def _permutation(self, size: int, what: str, number: int) -> NDArray[np.int64]:
        """A random order that depends on the seed, the purpose and a number, and on nothing else.

        numpy promises to keep the raw bits of its generators from version to version, but not the
        permutations made of them; a run has to find its order again after an upgrade.
        """
        bits = np.random.Philox(np.random.SeedSequence([self._seed, crc32(what.encode()), number]))
        return np.argsort(bits.random_raw(size), kind="stable")

    def _check(self) -> None:
        problems = [
            Problem(
                f"{name}:{index}",
                f"the document has {lengths[index]} tokens, a row holds 1 to {self._capacity}",
                "truncate, split or drop it in the preparation (overflow: truncate)",
            )
            for name, lengths in zip(self._names, self._lengths, strict=True)
            for index in np.flatnonzero((lengths < 1) | (lengths > self._capacity)).tolist()
        ]
        share = sum(
            (weight * len(each) for weight, each in zip(self._weights, self._lengths, strict=True)),
            Fraction(0),
        )
        if share < 1:
            documents = sum(map(len, self._lengths))
            problems.append(
                Problem(
                    "data.train",
                    f"an epoch of these weights takes less than one of the {documents} documents",
                    "give the data sets larger weights, or more rows",
                )
            )
        if problems:
            raise DataError(problems)
