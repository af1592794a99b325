"""Rows as they are read: good ones with their number, bad ones with the reason.

A bad row never stops the reading of the others. A `Part` is a stretch of a source that one process
reads by itself; it is small to send to another process, and opens its file only when iterated.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    import datasets
    import pyarrow

BOM = b"\xef\xbb\xbf"
DEEPEST = 100  # levels of nesting; no format here needs more than five
TABLE_BATCH = 256  # rows of an Arrow table that are turned into Python objects at a time

# A high surrogate without a low one after it, or a low one without a high one before it.
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its line or row number (counted from 1), and its columns."""

    number: int
    value: dict[str, Any]
    size: int = 0
    """About how many bytes it takes, so that a batch can be kept small; 0 where not known."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be used, and why."""

    number: int
    reason: str
    column: int | None = None
    """The character of the line where it goes wrong, counted from 1, where there is one."""
    missing: str = ""
    """The column that it lacks, if that is the reason."""


class Part(Protocol):
    """A stretch of a source."""

    @property
    def count(self) -> int | None:
        """About how many rows it holds, if that is known without reading it."""
        ...

    def rows(self) -> Iterator[Row | BadRow]: ...


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

    def rows(self) -> Iterator[Row | BadRow]:
        read = JsonReader().read_object if self.kind == "json" else _text_row
        for number, raw in _lines(self.path, self.start, self.stop, self.first):
            yield _line_row(number, raw, read)


@dataclass(frozen=True)
class JsonArray:
    """A JSON file that is a list of rows. Its text is held in memory, its rows one at a time."""

    path: Path
    count: int | None = None

    def rows(self) -> Iterator[Row | BadRow]:
        reader = JsonReader()
        text = json_text(self.path)
        position = text.index("[") + 1
        number = 0
        try:
            while text[(position := _skip_blanks(text, position)) : position + 1] != "]":
                number += 1
                value, end = reader.decode(text, position)
                yield reader.row(number, value, text[position:end])
                position = _skip_blanks(text, end)
                if text[position : position + 1] not in (",", "]"):
                    raise json.JSONDecodeError("expecting ',' or ']'", text, position)
                position += text[position] == ","
        except json.JSONDecodeError as error:
            raise broken_json(self.path, error) from None
        except (RecursionError, ValueError) as error:
            why = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
            fix = "mend that row: those after it can't be read"
            raise DataError(Problem(f"{self.path}:row {number}", why, fix)) from None


@dataclass(frozen=True)
class JsonObject:
    """A JSON file that is an object with a list of rows in it, or a single row itself."""

    path: Path
    key: str = ""
    """Where the list is; empty for a file that is a row."""
    count: int | None = None

    def rows(self) -> Iterator[Row | BadRow]:
        reader = JsonReader()
        value, _ = reader.decode(json_text(self.path), 0)
        if reader.duplicate:
            fact = f"the key {reader.duplicate!r} is written twice in one object"
            raise DataError(Problem(str(self.path), fact, "keep one of the two"))
        for number, row in enumerate(value[self.key] if self.key else [value], 1):
            yield reader.row(number, row, json.dumps(row))


@dataclass(frozen=True)
class CsvFile:
    """A CSV file with a header; quoting is read strictly, so that no quote swallows other rows."""

    path: Path
    delimiter: str
    count: int | None = None

    def rows(self) -> Iterator[Row | BadRow]:
        csv.field_size_limit(sys.maxsize)
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
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
                elif not all(map(_encodable, fields)):
                    yield BadRow(number, "not UTF-8 text")
                else:
                    yield Row(number, dict(zip(header, fields, strict=True)), sum(map(len, fields)))

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

    def rows(self) -> Iterator[Row | BadRow]:
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
class SavedRows:
    """Rows [start, stop) of a data set of the `datasets` library."""

    dataset: datasets.Dataset
    start: int
    stop: int

    @property
    def count(self) -> int | None:
        return self.stop - self.start

    def rows(self) -> Iterator[Row | BadRow]:
        number = self.start + 1
        part = self.dataset.select(range(self.start, self.stop)).with_format("arrow")
        for batch in part.iter(TABLE_BATCH):
            yield from _table_rows(batch, number)
            number += len(batch)


class Unreadable(Exception):
    """Why a row can't be read, and at which character."""

    def __init__(self, reason: str, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column


class JsonReader:
    """Reads JSON objects, and refuses what Python's reader lets through in silence."""

    def __init__(self) -> None:
        self.duplicate = ""  # a key that stood twice in an object of the last value
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def decode(self, text: str, position: int) -> tuple[Any, int]:
        """The value at `position`, or behind the blanks there, and where it ends."""
        self.duplicate = ""
        return self._decoder.raw_decode(text, _skip_blanks(text, position))

    def read_object(self, text: str) -> dict[str, Any]:
        """The object that is the whole of `text`."""
        try:
            value, end = self.decode(text, 0)
            end = _skip_blanks(text, end)
            if end < len(text):
                raise json.JSONDecodeError("something follows the end of the value", text, end)
        except json.JSONDecodeError as error:
            raise Unreadable(f"broken JSON: {error.msg}", error.pos + 1) from None
        except RecursionError:
            raise Unreadable(f"nested more than {DEEPEST} levels deep") from None
        except ValueError as error:  # a number of more digits than Python will read
            raise Unreadable(f"broken JSON: {error}") from None
        return self._checked(value, text)

    def row(self, number: int, value: Any, text: str) -> Row | BadRow:
        """The row of a list that was just decoded from `text`."""
        try:
            return Row(number, self._checked(value, text), len(text))
        except Unreadable as error:
            # Its column would be one of the cut-out text; the row's number is what helps here.
            return BadRow(number, error.reason)

    def _checked(self, value: Any, text: str) -> dict[str, Any]:
        """`value`, which was just decoded from `text`, if it is a sound object."""
        if not isinstance(value, dict):
            raise Unreadable(f"{_kind(value)}, not a JSON object with columns")
        if self.duplicate:
            raise Unreadable(f"the key {self.duplicate!r} is written twice")
        # Counting brackets is much faster than walking, and clears nearly all rows.
        if text.count("{") + text.count("[") > DEEPEST and _too_deep(value):
            raise Unreadable(f"nested more than {DEEPEST} levels deep")
        if not text.isascii() and not _encodable(text):
            raise Unreadable("not UTF-8 text")
        if ("\\ud" in text or "\\uD" in text) and (found := _LONE_SURROGATE.search(text)):
            self._require_text(value, found)
        return value

    def _require_text(self, value: Any, found: re.Match[str]) -> None:
        """Raises if the value can't be written as UTF-8 (`found` may have been a false alarm)."""
        if not _encodable(json.dumps(value, ensure_ascii=False)):
            reason = f"half a surrogate pair ({found.group()}), which no text can hold"
            raise Unreadable(reason, found.start() + 1)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            keys = [key for key, _ in pairs]
            self.duplicate = next(key for key in keys if keys.count(key) > 1)
        return value


def broken_json(path: Path, error: json.JSONDecodeError) -> DataError:
    """The error for a JSON file that is broken as a whole."""
    place = f"{path}:{error.lineno}:{error.colno}"
    return DataError(Problem(place, f"broken JSON: {error.msg}", "mend the file at that place"))


def json_text(path: Path) -> str:
    """The text of a JSON file. Bytes that are no UTF-8 become lone surrogates, which spoil only
    the row that they stand in."""
    return path.read_bytes().removeprefix(BOM).decode("utf-8", "surrogateescape")


def _lines(path: Path, start: int, stop: int, first: int) -> Iterator[tuple[int, bytes]]:
    """The lines that start in [start, stop) and aren't blank, without their ends, numbered."""
    with path.open("rb") as file:
        file.seek(start)
        number = first
        while start < stop and (raw := file.readline()):
            start += len(raw)
            raw = raw.rstrip(b"\r\n").removeprefix(BOM)
            if raw.strip():
                yield number, raw
            number += 1


def _line_row(number: int, raw: bytes, read: Callable[[str], dict[str, Any]]) -> Row | BadRow:
    try:
        return Row(number, read(_decoded(raw)), len(raw))
    except Unreadable as error:
        return BadRow(number, error.reason, error.column)


def _text_row(line: str) -> dict[str, Any]:
    return {"text": line}


def _decoded(raw: bytes) -> str:
    if b"\0" in raw:
        raise Unreadable("a NUL byte", raw.index(b"\0") + 1)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(raw[: error.start].decode("utf-8")) + 1
        reason = f"not UTF-8 text (byte 0x{raw[error.start]:02x})"
        raise Unreadable(reason, column) from None


def _table_rows(batch: pyarrow.RecordBatch | pyarrow.Table, first: int) -> Iterator[Row | BadRow]:
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError:  # Arrow does not check its text; look which of the rows it is
        for offset in range(len(batch)):
            yield from _table_row(batch.slice(offset, 1), first + offset)
        return
    for number, value in enumerate(values, first):
        yield Row(number, value)


def _table_row(row: pyarrow.RecordBatch | pyarrow.Table, number: int) -> Iterator[Row | BadRow]:
    try:
        yield Row(number, row.to_pylist()[0])
    except UnicodeDecodeError:
        yield BadRow(number, "not UTF-8 text")


_BLANKS = re.compile(r"[ \t\r\n]*")


def _skip_blanks(text: str, position: int) -> int:
    found = _BLANKS.match(text, position)
    return found.end() if found else position


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list"}
    return names[type(value)]
