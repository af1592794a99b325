"""Collation: rows of documents become the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from shardtune.core.step import IGNORED, MicroBatch
from shardtune.data.cache_digests import document_digest, forget_checked
from shardtune.data.dataset import PreparedSet
from shardtune.data.sampler import BatchRow, DocumentRef
from shardtune.errors import DataError, Problem

WIDTH_MULTIPLE = 8  # row widths that matrix units like


class Collator:
    """Fetches the documents of rows from their data sets and lays them out as tensors."""

    def __init__(self, sets: Sequence[PreparedSet], *, capacity: int, pad_id: int) -> None:
        """`Document.dataset` is an index into `sets`; a row is never wider than `capacity`."""
        self._sets = sets
        self._names = [each.name for each in sets]
        # As Arrow tables: a slice of the memory-mapped file, never a Python object per token.
        self._tables = [each.rows.with_format("arrow") for each in sets]
        self._capacity = capacity
        self._pad_id = pad_id

    def __call__(self, rows: Sequence[BatchRow]) -> MicroBatch:
        """Rows are padded on the right to the longest.

        No rows at all (a rank that has nothing to do in its turn still takes part) become one row
        of padding.
        """
        documents = [document for row in rows for document in row]
        width = _width(map(_tokens, rows), self._capacity)
        shape = (max(len(rows), 1), width)

        # Where each document begins, in its row and in the flat tensors.
        offsets = [list(accumulate((each.length for each in row[:-1]), initial=0)) for row in rows]
        places = [n * width + offset for n, row in enumerate(offsets) for offset in row]
        lengths = np.array([document.length for document in documents], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        flat = positions + np.repeat(np.array(places, dtype=np.int64), lengths)

        tokens, trained = self.fetch(documents, starts, len(flat))
        assert not trained[starts].any(), "nothing stands before a first token to predict it from"

        input_ids = np.full(shape, self._pad_id, dtype=np.int64)
        input_ids.flat[flat] = tokens
        targets = np.full(shape, IGNORED, dtype=np.int64)
        targets.flat[flat[trained] - 1] = tokens[trained]
        # Padding goes on counting where the last document stops. It looks like a part of it, which
        # is harmless (nothing looks ahead), and a row of one document needs no mask at all.
        last = np.array([row[-1] for row in offsets] or [0], dtype=np.int64)
        position_ids = np.arange(width) - last[:, None]
        position_ids.flat[flat] = positions
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            targets=torch.from_numpy(targets),
            samples=self.ids(documents),
            tokens=len(tokens),
            labels=int(trained.sum()),
            lengths=torch.tensor([_tokens(row) for row in rows] or [0]),
        )

    def size(self, rows: Sequence[BatchRow]) -> int:
        """Tokens of the micro-batch that rows become, padding counted."""
        return max(len(rows), 1) * _width(map(_tokens, rows), self._capacity)

    def ids(self, documents: Sequence[DocumentRef]) -> tuple[str, ...]:
        """The documents' sample ids."""
        return tuple(f"{self._names[each.dataset]}:{each.index}" for each in documents)

    def fetch(
        self, documents: Sequence[DocumentRef], starts: NDArray[np.int64], total: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The tokens of all documents one after the other, and which of them are trained."""
        tokens = np.empty(total, dtype=np.int64)
        trained = np.empty(total, dtype=np.bool_)
        for dataset in {document.dataset for document in documents}:
            mine = [n for n, each in enumerate(documents) if each.dataset == dataset]
            table = self._tables[dataset][[documents[n].index for n in mine]]
            values = pc.list_flatten(table["input_ids"]).to_numpy()
            flags = pc.list_flatten(table["trained"]).to_numpy()
            read = 0
            for n in mine:
                document = documents[n]
                ids, learnt = (each[read : read + document.length] for each in (values, flags))
                self._require_as_written(document, ids, learnt)
                place = slice(starts[n], starts[n] + document.length)
                tokens[place], trained[place] = ids, learnt
                read += document.length
        return tokens, trained

    def _require_as_written(
        self, document: DocumentRef, ids: NDArray[np.int32], trained: NDArray[np.bool_]
    ) -> None:
        """DataError for a document that isn't as it was prepared: a disk may lose bits silently."""
        prepared = self._sets[document.dataset]
        if prepared.checks is None or document_digest(ids, trained) == int(
            prepared.checks[document.index]
        ):
            return
        if prepared.folder is not None:
            forget_checked(prepared.folder)
        (name,) = self.ids([document])
        fact = f"document {name} is no longer as it was prepared: the disk has changed it"
        fix = "go on with --resume: the prepared data is checked whole, and made anew"
        raise DataError(Problem(str(prepared.folder), fact, fix))


class PairCollator(Collator):
    """Lays out pairs: sources as rows of their own for an encoder, targets for a decoder."""

    def __init__(
        self, sets: Sequence[PreparedSet], *, capacity: int, target_capacity: int, pad_id: int
    ) -> None:
        super().__init__(sets, capacity=capacity, pad_id=pad_id)
        self._target_capacity = target_capacity

    def __call__(self, rows: Sequence[BatchRow], source: int = 1, target: int = 1) -> MicroBatch:
        """Sources and targets are padded on the right, each to the longest of its side, and to
        `source` and `target` tokens at least."""
        documents = [document for row in rows for document in row]
        lengths = np.array([document.length for document in documents], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        tokens, trained = self.fetch(documents, starts, int(lengths.sum()))
        ends = list(zip(starts, starts + lengths, strict=True))
        sources = [tokens[start:end][~trained[start:end]] for start, end in ends]
        targets = [tokens[start:end][trained[start:end]] for start, end in ends]
        input_ids = _padded(sources, self._pad_id, source, self._capacity)
        mask = _padded([np.ones_like(each) for each in sources], 0, source, self._capacity)
        labels = _padded(targets, IGNORED, target, self._target_capacity)
        if not rows:  # of nothing but padding an encoder would make numbers that are none
            mask[:, :1] = 1
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.arange(input_ids.shape[1]).repeat(len(input_ids), 1),
            targets=torch.from_numpy(labels),
            samples=self.ids(documents),
            tokens=len(tokens),
            labels=int(trained.sum()),
            source_mask=torch.from_numpy(mask),
        )

    def size(self, rows: Sequence[BatchRow]) -> int:
        """Tokens of both sides."""
        documents = [document for row in rows for document in row]
        targets = [int(self._sets[each.dataset].labels[each.index]) for each in documents]
        sources = [each.length - n for each, n in zip(documents, targets, strict=True)]
        width = _width(sources, self._capacity) + _width(targets, self._target_capacity)
        return max(len(rows), 1) * width


def _tokens(row: BatchRow) -> int:
    return sum(document.length for document in row)


def _width(lengths: Iterable[int], capacity: int, least: int = 1) -> int:
    """Of a table whose rows have so many tokens."""
    longest = max([least, *lengths])
    return min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, capacity)


def _padded(
    rows: Sequence[NDArray[np.int64]], value: int, least: int, capacity: int
) -> NDArray[np.int64]:
    """The rows as one table at least so wide, `value` behind each; one row of it where there are
    none."""
    width = _width(map(len, rows), capacity, least)
    table = np.full((max(len(rows), 1), width), value, dtype=np.int64)
    for row, values in zip(table, rows, strict=False):
        row[: len(values)] = values
    return table
