"""Opens a data file as bytes, decompressed where it is compressed."""

from __future__ import annotations

import io
from pathlib import Path, PurePath
from typing import BinaryIO, cast

from shardtune.core.files.regular_file import open_regular

BOM = b"\xef\xbb\xbf"

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
_COMPRESSED = (".gz", ".bz2", ".zst", ".zstd")


def compression(path: Path) -> str | None:
    """How a file is compressed, by its first bytes; None where it isn't."""
    with open_regular(path) as file:
        head = file.read(4)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def open_file(path: Path) -> BinaryIO:
    """The file's content. In a compressed file nothing can be sought."""
    kind = compression(path)
    if kind is None:
        return open_regular(path)
    import pyarrow

    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression=kind)))


def ending(path: PurePath) -> str:
    """The ending that says what is in a file: `.jsonl` of `rows.jsonl.gz`."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix
