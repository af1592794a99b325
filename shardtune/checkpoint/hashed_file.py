"""Files of a checkpoint: hashed while they are written, and read again byte by byte."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardtune.core.files.regular_file import NotAFile, open_regular

HASH_CHUNK = 1 << 20  # bytes that are hashed, then written: few enough to stay in the cache between
_LONGEST_HEADER = 100 << 20  # what safetensors accepts


@dataclass(frozen=True)
class FileDigest:
    """What a file must be like to be the one that was written."""

    bytes: int
    sha256: str


def write_file(path: Path, blocks: Iterator[memoryview] | Sequence[memoryview]) -> FileDigest:
    """Writes a new file, and returns when it is on the disk."""
    digest, size = sha256(), 0
    with path.open("xb", buffering=0) as file:
        for block in blocks:
            digest.update(block)
            size += len(block)
            while len(block):
                block = block[file.write(block) :]
        os.fsync(file.fileno())
    return FileDigest(size, digest.hexdigest())


def find_damage(path: Path, expected: FileDigest, metadata: Mapping[str, str] | None = None) -> str:
    """What is wrong with a file, or nothing. Every byte is read; a link is not followed."""
    try:
        opened = open_regular(path, follow_links=False)
    except FileNotFoundError:
        return "is missing"
    except (NotAFile, IsADirectoryError) as error:
        return str(error.strerror)
    except OSError as error:
        return f"can't be opened: {error.strerror}"
    with opened as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            found = f"has {size:,} bytes instead of {expected.bytes:,}"
        else:
            try:
                if _hash(file) == expected.sha256:
                    return ""
            except OSError as error:
                return f"can't be read: {error.strerror}"
            found = "has other content than was written (SHA-256 differs)"
        return found + _whose(file, metadata or {})


def _hash(file: Any) -> str:
    digest, buffer = sha256(), bytearray(HASH_CHUNK)
    view = memoryview(buffer)
    while count := file.readinto(buffer):
        digest.update(view[:count])
    return digest.hexdigest()


def _whose(file: Any, expected: Mapping[str, str]) -> str:
    """Says so if the file is another checkpoint's or another rank's: that is no decay of a disk."""
    try:
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            return ""
        found = json.loads(file.read(length))["__metadata__"]
        others = [f"{key} {found[key]}" for key in expected if found[key] != expected[key]]
        return f"; it belongs to {', '.join(others)}" if others else ""
    except (OSError, ValueError, KeyError, TypeError, MemoryError):
        return ""
