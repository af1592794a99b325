"""Finds out what a data file holds, and cuts it into parts that can be read apart.

That is decided by its content where that is possible (`.json` files are often lines, `.jsonl` files
sometimes a list), and by its ending where not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardtune.data.open_file import BOM, compression, ending, open_file
from shardtune.data.readers import (
    ArrowFile,
    CsvFile,
    JsonList,
    JsonRow,
    Lines,
    ParquetGroups,
    PartOfFile,
    SourcePart,
    broken_json,
    json_text,
)
from shardtune.data.records import JsonReader
from shardtune.data.text_documents import LINE, TextStretch, document_rule
from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    from shardtune.config.job import Source

READ_BLOCK = 1 << 20
FILE_SPAN = 1 << 32  # the numbers of rows that are one file's, where a source is several
PART_BYTES = 4 << 20  # bytes of a part of a file of lines
FILE_KINDS = "JSONL, JSON, CSV, TSV, Parquet, Arrow or text (.txt)"
TURNS = ("messages", "conversations")  # lists of objects that are a row's, not lists of rows

_TEXT = (".txt", ".md")
_ARROW = (".arrow", ".feather")
ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", *_ARROW, *_TEXT)


@dataclass(frozen=True)
class OpenedSource:
    """A source that was found: what identifies its content, and how to read it."""

    path: str
    """As the job names it."""
    digest: str
    parts: tuple[SourcePart, ...]
    numbering: Literal["line", "row"]
    size: int
    """Bytes to read."""
    unit: str = "a row"
    """What a document is made of."""
    note: str = ""
    """What to tell about how it is read."""
    files: tuple[OpenedSource, ...] = ()
    """Where it is several files: these, which the numbers of its rows point into."""

    @staticmethod
    def joined(path: str, files: Sequence[OpenedSource]) -> OpenedSource:
        """Several files as one source."""
        digest = hashlib.sha256("\n".join(file.digest for file in files).encode())
        return OpenedSource(
            path=path,
            digest=digest.hexdigest(),
            parts=tuple(
                PartOfFile(part, number * FILE_SPAN)
                for number, file in enumerate(files)
                for part in file.parts
            ),
            numbering="row",
            size=sum(file.size for file in files),
            unit=files[0].unit,
            note=files[0].note,
            files=tuple(files),
        )

    @property
    def count(self) -> int | None:
        """About how many rows there are, if that is known."""
        counts = [part.count for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def place(self, number: int, column: int | None = None) -> str:
        """`file:line`, `file:line:column` or `file:row N`."""
        if self.files:
            file, inner = divmod(number, FILE_SPAN)
            return self.files[file].place(inner, column)
        if self.numbering == "row":
            return f"{self.path}:row {number}"
        return f"{self.path}:{number}" if column is None else f"{self.path}:{number}:{column}"


def open_data_file(source: Source, path: Path) -> OpenedSource:
    """The file as the source is to read it; raises DataError where its kind can't be told."""
    head = _head(source, path)
    if ending(path) in _TEXT:
        return _open_text(source, path, head)
    kind = _kind_of(source, path, head)
    scanned = scan(path)
    opened = partial(_opened, source, path, type(kind).__name__, scanned)
    if isinstance(kind, Lines):
        return opened((Lines(path, kind.kind, *stretch) for stretch in scanned.stretches), "line")
    if isinstance(kind, ParquetGroups):
        return opened(_parquet_parts(path), "row")
    return opened([kind], "line" if isinstance(kind, CsvFile) else "row")


def _open_text(source: Source, path: Path, head: bytes) -> OpenedSource:
    rule = document_rule(source, head)
    scanned = scan(path, rule.border)
    parts = [
        Lines(path, "text", start, stop, first, count)
        if rule.by_line
        else TextStretch(path, rule.border, start, stop, first)
        for start, stop, first, count in scanned.stretches
    ]
    found = _opened(source, path, rule.unit, scanned, parts, "line")
    return replace(found, unit=rule.unit, note=rule.note)


def _opened(
    source: Source,
    path: Path,
    kind: str,
    scanned: ScannedFile,
    parts: Iterable[SourcePart],
    numbering: Literal["line", "row"],
) -> OpenedSource:
    # How a file is read decides what is in it: the same bytes may be lines or a table.
    how = f"{kind} {ending(path)} {scanned.digest}"
    digest = hashlib.sha256(how.encode()).hexdigest()
    return OpenedSource(source.path, digest, tuple(parts), numbering, scanned.size)


def _head(source: Source, path: Path) -> bytes:
    """The beginning of the file; raises DataError where it is of a kind that can't be read."""
    with open_file(path) as file:
        head = file.read(READ_BLOCK)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        fix = "save it as UTF-8: iconv -f UTF-16 -t UTF-8 OLD > NEW"
        raise DataError(Problem(source.path, "is UTF-16 text", fix))
    if head.startswith(b"PK\x03\x04"):
        fact = "is a zip archive (as Excel's files are)"
        raise DataError(Problem(source.path, fact, f"unpack it, or save it as {FILE_KINDS}"))
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        fact = "is a web page or XML, not data"
        raise DataError(Problem(source.path, fact, "fetch the file itself, not the page around it"))
    if head[257:262] == b"ustar":
        raise DataError(Problem(source.path, "is a tar archive", "unpack it, and name a file"))
    if head.startswith(b"version https://git-lfs."):
        fact = "is not the data but Git LFS's note of where it lies"
        raise DataError(Problem(source.path, fact, "fetch the file itself: git lfs pull"))
    return head


def _kind_of(source: Source, path: Path, head: bytes) -> SourcePart:
    """How to read the file: a part that stands for its kind."""
    if head.startswith(b"PAR1"):
        return ParquetGroups(path, (), 1, None)
    suffix = ending(path)
    if head.startswith(b"ARROW1") or suffix in _ARROW:
        return ArrowFile(path)
    if suffix in (".csv", ".tsv"):
        return CsvFile(path, "\t" if suffix == ".tsv" else _delimiter(head))
    first = head.removeprefix(BOM).lstrip()[:1]
    if first == b"[":
        return _array_or_lines(path)
    if first == b"{" and suffix == ".json":
        return _object_or_lines(source, path)
    if first == b"{" and _spans_lines(path, head):
        fact = "holds JSON objects that go over several lines"
        fix = "write each on a line of its own: jq -c . OLD > NEW"
        raise DataError(Problem(source.path, fact, fix))
    if suffix in (".json", ".jsonl", ".ndjson") or first == b"{":
        return Lines(path, "json", 0, 0, 1, None)
    if suffix == ".parquet":
        found = f"starts with {head[:12]!r}, not with b'PAR1'" if head else "is empty"
        fact, fix = f"is no Parquet file: it {found}", "write or fetch it again"
        raise DataError(Problem(source.path, fact, fix))
    shown = f"ends with {suffix}" if suffix else "has no ending"
    fact = f"its format isn't recognised: it {shown} and holds no JSON"
    raise DataError(Problem(source.path, fact, f"give it as {FILE_KINDS}"))


def _delimiter(head: bytes) -> str:
    """What separates the fields of a CSV file: where a comma is the decimal sign, it is another;
    and some programs call a file with tabs or bars so."""
    header = head.partition(b"\n")[0].decode("utf-8", "replace")
    return next((each for each in ",;\t|" if each in header), ",")


def _array_or_lines(path: Path) -> SourcePart:
    """A file that starts with a bracket: one list of rows, or lines that are lists (all bad)."""
    return Lines(path, "json", 0, 0, 1, None) if _first_line_is_whole(path) else JsonList(path)


def _object_or_lines(source: Source, path: Path) -> SourcePart:
    """A `.json` file that starts with a brace: lines in disguise, or one object."""
    if _first_line_is_whole(path):
        return Lines(path, "json", 0, 0, 1, None)
    reader = JsonReader()
    text = json_text(path)
    try:
        value, end = reader.decode(text, 0)
        if text[end:].strip():
            raise json.JSONDecodeError("something follows the end of the value", text, end)
    except json.JSONDecodeError as error:
        raise broken_json(path, error) from None
    except (ValueError, RecursionError) as error:
        raise DataError(Problem(source.path, f"broken JSON: {error}", "fix the file")) from None
    if reader.duplicate:
        fact = f"the key {reader.duplicate!r} is written twice in an object"
        raise DataError(Problem(source.path, fact, "keep one of the two"))
    if value and all(_is_column(inner) for inner in value.values()):
        fact = "is a table by columns, as pandas writes it: rows are needed"
        fix = 'write it with DataFrame.to_json(..., orient="records", lines=True)'
        raise DataError(Problem(source.path, fact, fix))
    lists = [key for key, inner in value.items() if _is_rows(inner)]
    if len(lists) == 1 and lists[0] not in (*TURNS, source.columns.messages):
        return JsonList(path, lists[0])
    return JsonRow(path)


def _first_line_is_whole(path: Path) -> bool:
    """Whether the first line that isn't blank is a JSON value by itself, and others follow."""
    with open_file(path) as file:
        lines = (line for line in file if line.removeprefix(BOM).strip())
        first, second = next(lines, b""), next(lines, b"")
    try:
        json.loads(first.removeprefix(BOM))
    except (ValueError, RecursionError):
        return False
    return bool(second)


def _spans_lines(path: Path, head: bytes) -> bool:
    """Whether the first object of a file goes over several lines, and is sound."""
    text = head.removeprefix(BOM).decode("utf-8", "replace").lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _is_column(value: Any) -> bool:
    """Whether this is a column of a table that pandas wrote: values by the number of their row."""
    return isinstance(value, dict) and bool(value) and all(key.isdigit() for key in value)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


@dataclass(frozen=True)
class ScannedFile:
    """A file's hash, and where its lines can be cut."""

    digest: str
    size: int
    stretches: tuple[tuple[int, int, int, int], ...]
    """Start and stop in bytes, the first line's number, and the number of lines, of each."""


def scan(path: Path, border: re.Pattern[bytes] = LINE) -> ScannedFile:
    """Reads the file once, for its hash and for the places where a stretch may end: at a border,
    unless the file is compressed, which is read in one go."""
    digest = hashlib.sha256()
    cuts = [(0, 0)]  # (bytes, lines) before each stretch
    offset = lines = 0
    whole = compression(path) is not None
    with open_file(path) as file:
        while block := file.read(READ_BLOCK):
            digest.update(block)
            found = None if whole else border.search(block)
            if found and offset + (end := found.end()) - cuts[-1][0] >= PART_BYTES:
                cuts.append((offset + end, lines + block.count(b"\n", 0, end)))
            lines += block.count(b"\n")
            offset += len(block)
    cuts.append((offset, lines + 1))
    stretches = tuple(
        (start, stop, before + 1, after - before)
        for (start, before), (stop, after) in pairwise(cuts)
    )
    return ScannedFile(digest.hexdigest(), offset, stretches)


def _parquet_parts(path: Path) -> list[SourcePart]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            sizes = [
                file.metadata.row_group(group).num_rows
                for group in range(file.metadata.num_row_groups)
            ]
    except (pyarrow.ArrowException, OSError) as error:
        fact = f"can't be read as Parquet: {error}"
        raise DataError(Problem(str(path), fact, "write the file again")) from None
    parts: list[SourcePart] = []
    first = 1
    for group, size in enumerate(sizes):
        parts.append(ParquetGroups(path, (group,), first, size))
        first += size
    return parts
