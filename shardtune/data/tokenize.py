"""Reads parts of a source, cuts documents to length, and writes them as an Arrow file.

One process does one call of `tokenize`. Rows are taken in batches, so that the memory needed
depends on neither the size of the source nor that of its longest row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardtune.data.cache_digests import document_digest
from shardtune.data.complaints import Complaints
from shardtune.data.encode import Tokens
from shardtune.data.pairs import PairFormat
from shardtune.data.readers import SourcePart
from shardtune.data.records import BadRow, SourceRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardtune.data.formats import RowFormat

BATCH_ROWS = 1000
BATCH_BYTES = 4 << 20
COLUMNS_KEPT = 1000

Overflow = Literal["truncate", "split", "drop"]
ProgressCallback = Callable[[int, int], None]  # rows read and tokens made since the last call


@dataclass
class RowCounts:
    """What became of the rows."""

    rows: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0
    dropped: int = 0
    untrained: int = 0
    bad: int = 0
    longest: int = 0
    """Tokens of the longest row, before any cut."""
    complaints: Complaints = field(default_factory=Complaints)
    """Why rows are bad."""
    missing: dict[str, int] = field(default_factory=dict)
    """Rows that lack a required column, by its name."""
    columns: dict[str, None] = field(default_factory=dict)
    """The columns that were seen, in order."""

    def add(self, other: RowCounts) -> None:
        for name in ("rows", "truncated", "truncated_tokens", "split", "dropped", "untrained"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad += other.bad
        self.longest = max(self.longest, other.longest)
        self.complaints.add(other.complaints)
        for column, count in other.missing.items():
            self.missing[column] = self.missing.get(column, 0) + count
        self.see(other.columns)

    def refuse(self, row: BadRow) -> None:
        self.bad += 1
        if row.missing:
            self.missing[row.missing] = self.missing.get(row.missing, 0) + 1
        self.complaints.refuse(row)

    def see(self, columns: Iterable[str]) -> None:
        for name in columns:
            if len(self.columns) < COLUMNS_KEPT:
                self.columns.setdefault(name)


@dataclass(frozen=True)
class DocumentIndex:
    """A line about each document, in their order."""

    lengths: NDArray[np.int32]
    labels: NDArray[np.int32]
    finals: NDArray[np.int32]
    """The id of the last trained token."""
    numbers: NDArray[np.int64]
    """The line or row that it comes from."""
    digests: NDArray[np.uint64]
    """A hash of its token ids, two numbers for each."""
    contents: NDArray[np.uint64]
    """A hash of what its row says, the same for all documents of a row."""
    checks: NDArray[np.uint64]
    """A hash of its token ids and of which are trained, compared when it is read."""

    @staticmethod
    def of(documents: list[tuple[int, Tokens]]) -> DocumentIndex:
        ids = [tokens.ids for _, tokens in documents]
        trained = [tokens.trained for _, tokens in documents]
        finals = [
            one[len(flags) - 1 - int(flags[::-1].argmax())]
            for one, flags in zip(ids, trained, strict=True)
        ]
        digest = b"".join(hashlib.blake2b(one.data, digest_size=16).digest() for one in ids)
        return DocumentIndex(
            lengths=np.array([len(one) for one in ids], dtype=np.int32),
            labels=np.array([np.count_nonzero(flags) for flags in trained], dtype=np.int32),
            finals=np.array(finals, dtype=np.int32),
            numbers=np.array([number for number, _ in documents], dtype=np.int64),
            digests=np.frombuffer(digest, dtype="<u8").astype(np.uint64).reshape(-1, 2),
            contents=np.array([tokens.content for _, tokens in documents], dtype=np.uint64),
            checks=np.array(
                [document_digest(one, flags) for one, flags in zip(ids, trained, strict=True)],
                dtype=np.uint64,
            ),
        )

    def where(self, mask: NDArray[np.bool_]) -> DocumentIndex:
        """The lines of some of the documents."""
        return DocumentIndex(**{name: values[mask] for name, values in vars(self).items()})

    @staticmethod
    def joined(parts: list[DocumentIndex]) -> DocumentIndex:
        parts = [DocumentIndex.of([]), *parts]
        return DocumentIndex(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in DocumentIndex.__dataclass_fields__
            }
        )


def tokenize(
    parts: Iterable[SourcePart],
    format: RowFormat,
    *,
    length: int,
    overflow: Overflow,
    target: Path,
    progress: ProgressCallback,
) -> tuple[RowCounts, DocumentIndex]:
    """Writes the documents of the parts to `target`, an Arrow file of the `datasets` library."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    tally = RowCounts()
    indices: list[DocumentIndex] = []
    features = Features(input_ids=List(Value("int32")), trained=List(Value("bool")))
    with ArrowWriter(path=str(target), features=features) as writer:
        for batch in _batches(parts):
            read = tally.rows
            documents = list(_documents(batch, format, length, overflow, tally))
            if documents:
                writer.write_table(_table([tokens for _, tokens in documents]))
                indices.append(DocumentIndex.of(documents))
            progress(tally.rows - read, int(indices[-1].lengths.sum()) if documents else 0)
        writer.finalize()
    return tally, DocumentIndex.joined(indices)


def _batches(parts: Iterable[SourcePart]) -> Iterator[list[SourceRecord | BadRow]]:
    batch: list[SourceRecord | BadRow] = []
    size = 0
    for part in parts:
        for row in part.rows():
            batch.append(row)
            size += row.size if isinstance(row, SourceRecord) else 0
            if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _documents(
    batch: list[SourceRecord | BadRow],
    format: RowFormat,
    length: int,
    overflow: Overflow,
    tally: RowCounts,
) -> Iterator[tuple[int, Tokens]]:
    """The documents of a batch, each with the number of the row that it comes from."""
    rows = [row for row in batch if isinstance(row, SourceRecord)]
    encoded = iter(format.documents(rows))
    for row in batch:
        tally.rows += 1
        result = row if isinstance(row, BadRow) else next(encoded)
        if isinstance(row, SourceRecord) and not row.value.keys() <= tally.columns.keys():
            tally.see(row.value)
        if isinstance(result, BadRow):
            tally.refuse(result)
            continue
        if isinstance(format, PairFormat):
            documents = _cut_pair(result, format, length, overflow, tally)
        else:
            documents = _cut(result, length, overflow, tally)
        for document in documents:
            yield row.number, replace(document, content=result.content)


def _cut(tokens: Tokens, length: int, overflow: Overflow, tally: RowCounts) -> Iterator[Tokens]:
    """The documents that a row becomes: one, or none, or several when it is too long."""
    total = len(tokens.ids)
    tally.longest = max(tally.longest, total)
    if total > length and overflow == "drop":
        tally.dropped += 1
        return
    stop = total if overflow == "split" else length
    pieces = []
    for start in range(0, min(stop, total), length):
        trained = tokens.trained[start : start + length]
        trained[0] = False  # nothing stands before it to predict it from
        if trained.any():
            pieces.append(Tokens(tokens.ids[start : start + length], trained))
    if not pieces:
        tally.untrained += 1
    elif total > length and overflow == "truncate":
        tally.truncated += 1
        tally.truncated_tokens += total - length
    elif total > length:
        tally.split += 1
    yield from pieces


def _cut_pair(
    tokens: Tokens, format: PairFormat, length: int, overflow: Overflow, tally: RowCounts
) -> Iterator[Tokens]:
    """The pair with both sides within their lengths, or nothing where it is to be dropped."""
    tally.longest = max(tally.longest, int(tokens.trained.argmax()))
    cut, lost = format.cut(tokens, length)
    if lost and overflow == "drop":
        tally.dropped += 1
        return
    if lost:
        tally.truncated += 1
        tally.truncated_tokens += lost
    yield cut


def _table(documents: list[Tokens]) -> object:
    """The documents as an Arrow table, without a Python object for each token."""
    import pyarrow

    offsets = np.zeros(len(documents) + 1, dtype=np.int32)
    np.cumsum([len(one.ids) for one in documents], out=offsets[1:])
    columns = {
        "input_ids": np.concatenate([one.ids for one in documents]),
        "trained": np.concatenate([one.trained for one in documents]),
    }
    return pyarrow.table(
        {
            name: pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))
            for name, values in columns.items()
        }
    )
