"""Finds out what a data set's path means, and cuts it into parts that can be read apart.

What a file holds is decided by its content where that is possible (`.json` files are often lines,
`.jsonl` files sometimes a list), and by its ending where not. A text file is one row per line that
isn't blank, as the `datasets` library reads it too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardtune.data.readers import (
    BOM,
    CsvFile,
    JsonList,
    JsonRow,
    Lines,
    ParquetGroups,
    SavedRows,
    SourcePart,
    broken_json,
    json_text,
)
from shardtune.data.records import JsonReader
from shardtune.errors import DataError, Problem, did_you_mean

if TYPE_CHECKING:
    import datasets

    from shardtune.config.job import Source

READ_BLOCK = 1 << 20
PART_BYTES = 4 << 20  # bytes of a part of a file of lines
PART_ROWS = 10_000  # rows of a part of a table
FILE_KINDS = "JSONL, JSON, CSV, TSV, Parquet or text (.txt)"
TURNS = ("messages", "conversations")  # lists of objects that are a row's, not lists of rows

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")


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

    @property
    def count(self) -> int | None:
        """About how many rows there are, if that is known."""
        counts = [part.count for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def place(self, number: int, column: int | None = None) -> str:
        """`file:line`, `file:line:column` or `file:row N`."""
        if self.numbering == "row":
            return f"{self.path}:row {number}"
        return f"{self.path}:{number}" if column is None else f"{self.path}:{number}:{column}"


def open_source(source: Source) -> OpenedSource:
    """Finds the source; raises DataError if it is neither here nor on the hub."""
    path = Path(source.path).expanduser()
    try:
        if path.is_file():
            return _open_file(source, path)
        if path.is_dir():
            return _open_folder(source, path)
    except OSError as error:
        fix = "correct the path or its permissions"
        raise DataError(Problem(source.path, f"can't be read: {error.strerror}", fix)) from error
    if _looks_like_a_file(path, source.path):
        raise DataError(_missing(path, source.path))
    return _open_hub(source)


def _open_file(source: Source, path: Path) -> OpenedSource:
    scanned = _scan(path)
    kind = _kind_of(source, path)

    def opened(parts: Iterable[SourcePart], numbering: Literal["line", "row"]) -> OpenedSource:
        # How a file is read decides what is in it: the same bytes may be lines or a table.
        how = f"{type(kind).__name__} {path.suffix.lower()} {scanned.digest}"
        digest = hashlib.sha256(how.encode()).hexdigest()
        return OpenedSource(source.path, digest, tuple(parts), numbering, scanned.size)

    if isinstance(kind, Lines):
        return opened((Lines(path, kind.kind, *stretch) for stretch in scanned.stretches), "line")
    if isinstance(kind, ParquetGroups):
        return opened(_parquet_parts(path), "row")
    return opened([kind], "line" if isinstance(kind, CsvFile) else "row")


def _kind_of(source: Source, path: Path) -> SourcePart:
    """How to read the file: a part that stands for its kind."""
    with path.open("rb") as file:
        head = file.read(READ_BLOCK)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(Problem(source.path, "is UTF-16 text", "save it as UTF-8"))
    if head.startswith(b"version https://git-lfs."):
        fact = "is not the data but Git LFS's note of where it lies"
        raise DataError(Problem(source.path, fact, "fetch the file itself: git lfs pull"))
    if head.startswith(b"PAR1"):
        return ParquetGroups(path, (), 1, None)
    ending = path.suffix.lower()
    if ending in (".csv", ".tsv"):
        return CsvFile(path, "\t" if ending == ".tsv" else ",")
    if ending == ".txt":
        return Lines(path, "text", 0, 0, 1, None)
    first = head.removeprefix(BOM).lstrip()[:1]
    if first == b"[":
        return _array_or_lines(path)
    if first == b"{" and ending == ".json":
        return _object_or_lines(source, path)
    if ending in (".json", ".jsonl", ".ndjson") or first == b"{":
        return Lines(path, "json", 0, 0, 1, None)
    if ending == ".parquet":
        found = f"starts with {head[:12]!r}, not with b'PAR1'" if head else "is empty"
        fact, fix = f"is no Parquet file: it {found}", "write or fetch it again"
        raise DataError(Problem(source.path, fact, fix))
    shown = f"ends with {ending}" if ending else "has no ending"
    fact = f"its kind can't be told: it {shown} and holds no JSON"
    raise DataError(Problem(source.path, fact, f"give it as {FILE_KINDS}"))


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
    lists = [key for key, inner in value.items() if _is_rows(inner)]
    if len(lists) == 1 and lists[0] not in (*TURNS, source.columns.messages):
        return JsonList(path, lists[0])
    return JsonRow(path)


def _first_line_is_whole(path: Path) -> bool:
    """Whether the first line that isn't blank is a JSON value by itself, and others follow."""
    with path.open("rb") as file:
        lines = (line for line in file if line.removeprefix(BOM).strip())
        first, second = next(lines, b""), next(lines, b"")
    try:
        json.loads(first.removeprefix(BOM))
    except (ValueError, RecursionError):
        return False
    return bool(second)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


@dataclass(frozen=True)
class _Scanned:
    """A file's hash, and where its lines can be cut."""

    digest: str
    size: int
    stretches: tuple[tuple[int, int, int, int], ...]
    """Start and stop in bytes, the first line's number, and the number of lines, of each."""


def _scan(path: Path) -> _Scanned:
    """Reads the file once, for its hash and for the places where a stretch of lines may end."""
    digest = hashlib.sha256()
    cuts = [(0, 0)]  # (bytes, lines) before each stretch
    offset = lines = 0
    with path.open("rb") as file:
        while block := file.read(READ_BLOCK):
            digest.update(block)
            end = block.find(b"\n") + 1
            if end and offset + end - cuts[-1][0] >= PART_BYTES:
                cuts.append((offset + end, lines + 1))
            lines += block.count(b"\n")
            offset += len(block)
    cuts.append((offset, lines + 1))
    stretches = tuple(
        (start, stop, before + 1, after - before)
        for (start, before), (stop, after) in pairwise(cuts)
    )
    return _Scanned(digest.hexdigest(), offset, stretches)


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


def _open_folder(source: Source, path: Path) -> OpenedSource:
    import datasets

    if (path / "dataset_dict.json").is_file():
        names = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if source.split not in names:
            raise DataError(_no_split(source, names))
        path = path / source.split
    elif not (path / "state.json").is_file():
        fact = "is a folder that `datasets` did not save"
        fix = "name a file in it, or save the data set with save_to_disk"
        raise DataError(Problem(source.path, fact, fix))
    loaded = _with_library(source, lambda: datasets.load_from_disk(str(path)))
    digest = hashlib.sha256()
    size = 0
    for file in sorted(path.rglob("*")):
        if file.is_file():
            scanned = _scan(file)
            digest.update(f"{file.relative_to(path)} {scanned.digest}\n".encode())
            size += scanned.size
    return _open_dataset(source, loaded, digest.hexdigest(), size)


def _open_hub(source: Source) -> OpenedSource:
    import datasets

    if _HUB_ID.fullmatch(source.path) is None:
        fact = "is neither a file here nor a hub id"
        raise DataError(Problem(source.path, fact, f"name a {FILE_KINDS} file, or a hub id"))
    loaded = _with_library(source, lambda: datasets.load_dataset(source.path, split=source.split))
    # The library derives the fingerprint from the revision and the files of the split.
    digest = f"{loaded._fingerprint} {loaded.info.download_checksums} {len(loaded)}"
    size = int(loaded.data.nbytes)
    return _open_dataset(source, loaded, hashlib.sha256(digest.encode()).hexdigest(), size)


def _open_dataset(source: Source, loaded: datasets.Dataset, digest: str, size: int) -> OpenedSource:
    parts = tuple(
        SavedRows(loaded, start, min(start + PART_ROWS, len(loaded)))
        for start in range(0, len(loaded), PART_ROWS)
    )
    return OpenedSource(source.path, digest, parts, "row", size)


def _with_library(source: Source, load: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    """What `load` returns, with the library's errors told as ours."""
    import datasets
    import pyarrow

    try:
        return load()
    except (
        OSError,  # unreachable, or files missing
        ValueError,  # no such split or configuration
        RuntimeError,  # a repository with a loading script
        pyarrow.ArrowException,
        datasets.exceptions.DatasetsError,
    ) as error:
        reason = str(error).strip().split("\n")[0]
        if Path(source.path).exists():
            fact, fix = f"`datasets` can't load it: {reason}", "save it again with save_to_disk"
        else:
            fact = f"is neither a file here nor a data set that the hub gives: {reason}"
            fix = "correct the path or the id, or check the network"
        raise DataError(Problem(source.path, fact, fix)) from error


def _no_split(source: Source, names: list[str]) -> Problem:
    fact = f"has no split {source.split!r}; it has {', '.join(names)}"
    return Problem(source.path, fact, f"split: {did_you_mean(source.split, names) or names[0]}")


def _looks_like_a_file(path: Path, written: str) -> bool:
    if path.suffix.lower() in _ENDINGS or written.startswith((".", "/", "~")):
        return True
    return written.count("/") > 1 or (path.parent != Path() and path.parent.is_dir())


def _missing(path: Path, written: str) -> Problem:
    folder = path.parent
    if not folder.is_dir():
        fact = f"there is no such file, nor the folder {folder}"
        return Problem(written, fact, "correct the path")
    near = did_you_mean(path.name, sorted(entry.name for entry in folder.iterdir()))
    fix = f"did you mean {folder / near}?" if near else "correct the path"
    return Problem(written, f"there is no such file (looked for {path.absolute()})", fix)
