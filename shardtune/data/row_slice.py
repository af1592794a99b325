"""A slice of a file's rows: `split: "train[:1000]"`, as the `datasets` library writes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

from shardtune.data.data_file import OpenedSource
from shardtune.data.readers import SourcePart
from shardtune.data.records import BadRow, SourceRecord
from shardtune.errors import DataError, Problem


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of what some parts hold, counted over all of them."""

    parts: tuple[SourcePart, ...]
    start: int
    stop: int

    @property
    def count(self) -> int:
        return max(self.stop - self.start, 0)

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        every = chain.from_iterable(part.rows() for part in self.parts)
        return islice(every, self.start, self.stop)


def sliced(opened: OpenedSource, split: str) -> OpenedSource:
    """The rows that `split` names of a file's only split, `train`. All rows are read once, to count
    them: a percentage and a negative bound need the number."""
    import datasets

    total = sum(1 for part in opened.parts for _ in part.rows())
    try:
        wanted = datasets.ReadInstruction.from_spec(split).to_absolute({"train": total})
    except ValueError as error:
        fact = f"split {split!r} is no slice of its {total:,} rows: {error}"
        fix = "write it as train[:1%], train[100:200] or train[-50:]"
        raise DataError(Problem(opened.path, fact, fix)) from error
    ranges = tuple(RowRange(opened.parts, part.from_, part.to) for part in wanted)
    if not any(each.count for each in ranges):
        fact = f"split {split!r} holds none of its {total:,} rows"
        raise DataError(Problem(opened.path, fact, "take more rows, or leave split out"))
    digest = hashlib.sha256(f"{opened.digest} {split}".encode()).hexdigest()
    return replace(opened, digest=digest, parts=ranges)
