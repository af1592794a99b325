"""Parts of a source: a stretch that one process reads by itself.

A part is small to send to another process, and opens its file only when it is read. A bad row never
stops the reading of the others.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardtune.data.open_file import BOM, open_file
from shardtune.data.records import (
    NOT_UTF8,
    BadRow,
    JsonReader,
    SourceRecord,
    Unreadable,
    decoded,
    encodable,
    skip_blanks,
)
from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    import datasets
    import pyarrow

TABLE_BATCH = 256  # rows of an Arrow table that are turned into Python objects at a time


class SourcePart(Protocol):
    """A stretch of a source."""

    @property
    def count(self) -> int | None:
        """About how many rows it holds, if that is known without reading it."""
        ...

    def rows(self) -> Iterator[SourceRecord | BadRow]: ...


@dataclass(frozen=True)
class Lines:
    """Lines `first`, `first + 1` ... of a file: those that start in bytes [start, stop).

    A line that isn't blank is a row: a JSON object, or text, which is the column `text` then.
    """

    path: Path
    kind: Literal["json", "text"]
    start: int
    stop: int
    first: int
    count: int | None

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        read = JsonReader().read_object if self.kind == "json" else _text_row
        for number, raw in _lines(self.path, self.start, self.stop, self.first):
            yield _line_row(number, raw, read)


@dataclass(frozen=True)
class JsonList:
    """A JSON file that is a list of rows, or an object with such a list under a key.

    Its text is held in memory, its rows one at a time.
    """

    path: Path
    key: str | None = None
    count: int | None = None

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        reader = JsonReader()
        text = json_text(self.path)
        number = 0
        try:
            position = self._start(reader, text)
            more = text[position : position + 1] != "]"
            while more:
                number += 1
                value, end = reader.decode(text, position)
                yield reader.row(number, value, text[position:end])
                position = skip_blanks(text, end)
                if text[position : position + 1] not in (",", "]"):
                    raise json.JSONDecodeError("expecting ',' or ']'", text, position)
                more = text[position] == ","
                position = skip_blanks(text, position + 1)
            if self.key is None and number and position < len(text):
                raise json.JSONDecodeError("something follows the end of the list", text, position)
        except json.JSONDecodeError as error:
            raise broken_json(self.path, error) from None
        except (RecursionError, ValueError) as error:
            why = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
            fix = "fix that row: those after it can't be read"
            raise DataError(Problem(f"{self.path}:row {number}", why, fix)) from None

    def _start(self, reader: JsonReader, text: str) -> int:
        """The place of the first row in the list."""
        position = skip_blanks(text, 0)
        if self.key is not None:  # of an object, which was found sound when the file was opened
            name, end = reader.decode(text, position + 1)
            while name != self.key:
                _, end = reader.decode(text, skip_blanks(text, end) + 1)  # behind the colon
                name, end = reader.decode(text, skip_blanks(text, end) + 1)  # behind the comma
            position = skip_blanks(text, skip_blanks(text, end) + 1)
        return skip_blanks(text, position + 1)


@dataclass(frozen=True)
class JsonRow:
    """A JSON file that is a single row."""

    path: Path
    count: int | None = 1

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        reader = JsonReader()
        text = json_text(self.path)
        value, _ = reader.decode(text, 0)
        yield reader.row(1, value, text)


@dataclass(frozen=True)
class CsvFile:
    """A CSV file with a header; quoting is read strictly, so that no quote swallows other rows."""

    path: Path
    delimiter: str
    count: int | None = None

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        csv.field_size_limit(sys.maxsize)
        with (
            open_file(self.path) as raw,
            io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="") as file,
        ):
            reader = csv.reader(file, delimiter=self.delimiter, strict=True)
            header: list[str] = []
            while True:
                number = reader.line_num + 1  # where the record starts; it may go over several
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield BadRow(number, f"broken CSV: {error}")
                    continue
                if not any(field.strip() for field in fields):
                    continue
                if not header:
                    header = self._header(fields, number)
                elif len(fields) != len(header):
                    reason = f"{len(fields)} fields, but the header names {len(header)}"
                    yield BadRow(number, reason)
                elif not all(map(encodable, fields)):
                    yield BadRow(number, NOT_UTF8)
                else:
                    yield SourceRecord(
                        number, dict(zip(header, fields, strict=True)), sum(map(len, fields))
                    )

    def _header(self, fields: list[str], number: int) -> list[str]:
        names = [field.strip() for field in fields]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            fact = f"the header names {', '.join(map(repr, twice))} twice"
            raise DataError(Problem(f"{self.path}:{number}", fact, "name each column once"))
        return names


@dataclass(frozen=True)
class ParquetGroups:
    """Row groups of a Parquet file."""

    path: Path
    groups: tuple[int, ...]
    first: int
    count: int | None

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        import pyarrow
        import pyarrow.parquet

        number = self.first
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(TABLE_BATCH, row_groups=list(self.groups)):
                    yield from _table_rows(batch, number)
                    number += len(batch)
        except (pyarrow.ArrowException, OSError) as error:
            fact = f"can't be read as Parquet from row {number} on: {error}"
            raise DataError(Problem(str(self.path), fact, "write the file again")) from None


@dataclass(frozen=True)
class ArrowFile:
    """An Arrow file: in the IPC file format (Feather is that, too), or a stream, as `datasets`
    writes its cache."""

    path: Path
    count: int | None = None

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        import pyarrow

        number = 1
        try:
            with pyarrow.memory_map(str(self.path)) as file:
                for batch in _record_batches(file):
                    for start in range(0, len(batch), TABLE_BATCH):
                        yield from _table_rows(batch.slice(start, TABLE_BATCH), number + start)
                    number += len(batch)
        except (pyarrow.ArrowException, OSError) as error:
            fact = f"can't be read as Arrow from row {number} on: {error}"
            raise DataError(Problem(str(self.path), fact, "write the file again")) from None


@dataclass(frozen=True)
class SavedRows:
    """Rows [start, stop) of a data set of the `datasets` library."""

    dataset: datasets.Dataset
    start: int
    stop: int

    @property
    def count(self) -> int | None:
        return self.stop - self.start

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        number = self.start + 1
        part = self.dataset.select(range(self.start, self.stop)).with_format("arrow")
        for batch in part.iter(TABLE_BATCH):
            yield from _table_rows(batch, number)
            number += len(batch)


@dataclass(frozen=True)
class PartOfFile:
    """A part of one of several files: the numbers of its rows start behind `base`."""

    part: SourcePart
    base: int

    @property
    def count(self) -> int | None:
        return self.part.count

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        for row in self.part.rows():
            yield replace(row, number=self.base + row.number)


def broken_json(path: Path, error: json.JSONDecodeError) -> DataError:
    """The error for a JSON file that is broken as a whole."""
    place = f"{path}:{error.lineno}:{error.colno}"
    return DataError(Problem(place, f"broken JSON: {error.msg}", "fix the file at that place"))


def json_text(path: Path) -> str:
    """The text of a JSON file. Bytes that are no UTF-8 become lone surrogates, which spoil only
    the row that they stand in."""
    with open_file(path) as file:
        return file.read().removeprefix(BOM).decode("utf-8", "surrogateescape")


def _lines(path: Path, start: int, stop: int, first: int) -> Iterator[tuple[int, bytes]]:
    """The lines that start in [start, stop) and aren't blank, without their ends, numbered."""
    with open_file(path) as file:
        if start:
            file.seek(start)
        number = first
        while start < stop and (raw := file.readline()):
            start += len(raw)
            raw = raw.rstrip(b"\r\n").removeprefix(BOM)
            if raw.strip():
                yield number, raw
            number += 1


def _line_row(
    number: int, raw: bytes, read: Callable[[str], dict[str, Any]]
) -> SourceRecord | BadRow:
    try:
        return SourceRecord(number, read(decoded(raw)), len(raw))
    except Unreadable as error:
        return BadRow(number, error.reason, error.column)


def _text_row(line: str) -> dict[str, Any]:
    return {"text": line}


def _record_batches(file: pyarrow.MemoryMappedFile) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    if is_stream:
        yield from pyarrow.ipc.open_stream(file)
        return
    reader = pyarrow.ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _table_rows(
    batch: pyarrow.RecordBatch | pyarrow.Table, first: int
) -> Iterator[SourceRecord | BadRow]:
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError:  # Arrow does not check its text; look which of the rows it is
        for offset in range(len(batch)):
            yield from _table_row(batch.slice(offset, 1), first + offset)
        return
    structured = _structured_columns(batch)
    for number, value in enumerate(values, first):
        yield SourceRecord(number, _without_nulls(value, structured))


def _table_row(
    row: pyarrow.RecordBatch | pyarrow.Table, number: int
) -> Iterator[SourceRecord | BadRow]:
    try:
        yield SourceRecord(number, _without_nulls(row.to_pylist()[0], _structured_columns(row)))
    except UnicodeDecodeError:
        yield BadRow(number, NOT_UTF8)


def _structured_columns(batch: pyarrow.RecordBatch | pyarrow.Table) -> list[str]:
    """The columns that hold objects, however deep."""
    return [field.name for field in batch.schema if _holds_objects(field.type)]


def _holds_objects(kind: pyarrow.DataType) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return True
    lists = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    return any(is_one(kind) for is_one in lists) and _holds_objects(kind.value_type)


def _without_nulls(row: dict[str, Any], columns: list[str]) -> dict[str, Any]:
    """The row without what its objects lack: a table gives each of them the keys of all others, so
    a call would be written with the arguments of every other function, as null."""
    return {**row, **{name: _pruned(row[name]) for name in columns}}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value
