"""Digests of prepared data, so that what was written is what is trained.

Three looks, none of which makes a start wait for gigabytes to be read again:

- at each start, the size and the times of every file: whoever writes to a file changes them;
- where these differ (or the folder was copied here), every byte, in blocks that all cores hash;
- in training, each document as it is read (`document_digest`), for what a disk loses silently.

They find damage, not an adversary: who can write to the cache can write its digests, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.core.files.atomic_write import atomic_write
from shardtune.core.files.regular_file import open_regular, read_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DIGEST_FILE = "digests.json"
_STAMP_FILE = "checked.json"  # sizes and times of files whose every byte was found good
_BLOCK = 64 << 20  # bytes that one thread hashes at a time
_READ = 1 << 20
_MOST = 64 << 20  # bytes of the two files above; those of terabytes have less

Digests = dict[str, list[str]]
"""Of each file, the digests of its blocks."""


def document_digest(ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> int:
    """64 bits of a document's tokens and of which of them are trained."""
    digest = hashlib.blake2b(ids.tobytes(), digest_size=8)
    digest.update(trained.tobytes())
    return int.from_bytes(digest.digest(), "little")


def write_digests(folder: Path) -> None:
    """Adds the digests of all files in a folder that is being made."""
    body = json.dumps(_digests(folder), sort_keys=True)
    text = json.dumps({"files": body, "digest": _hash(body.encode())})
    (folder / DIGEST_FILE).write_text(text, encoding="utf-8")


def mark_checked(folder: Path) -> None:
    """Notes that every byte is as written, by the files' sizes and times. Where that can't be
    written the bytes are read again next time, which is slow and no harm."""
    with suppress(OSError):
        atomic_write(folder / _STAMP_FILE, json.dumps(_stamps(folder)))


def forget_checked(folder: Path) -> None:
    """Lets the next start read every byte."""
    with suppress(OSError):
        (folder / _STAMP_FILE).unlink(missing_ok=True)


def find_cache_damage(folder: Path) -> str:
    """What is wrong with a folder of prepared data, or nothing."""
    try:
        with suppress(OSError, ValueError):
            if json.loads(read_regular(folder / _STAMP_FILE, _MOST)) == _stamps(folder):
                return ""
        expected = _read_digests(folder)
        found = _digests(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{DIGEST_FILE} or a file that it lists can't be read ({error})"
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} does not belong to it"
        if expected[name] != found[name]:
            return f"{name} has other content than was written"
    mark_checked(folder)
    return ""


def _read_digests(folder: Path) -> Digests:
    document = json.loads(read_regular(folder / DIGEST_FILE, _MOST))
    if _hash(document["files"].encode()) != document["digest"]:
        raise ValueError(f"{DIGEST_FILE} is not what was written")
    files: Digests = json.loads(document["files"])
    return files


def _digests(folder: Path) -> Digests:
    files = [path for path in _files(folder) if path.name != DIGEST_FILE]
    blocks = [
        (path, start) for path in files for start in range(0, max(path.stat().st_size, 1), _BLOCK)
    ]
    found: Digests = {path.name: [] for path in files}
    # Hashing leaves the interpreter's lock to others, so threads are as good as processes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (path, _), digest in zip(blocks, pool.map(_block_digest, blocks), strict=True):
            found[path.name].append(digest)
    return found


def _block_digest(block: tuple[Path, int]) -> str:
    path, start = block
    digest = hashlib.blake2b(digest_size=16)
    with open_regular(path) as file:
        file.seek(start)
        left = _BLOCK
        while left and (read := file.read(min(_READ, left))):
            digest.update(read)
            left -= len(read)
    return digest.hexdigest()


def _stamps(folder: Path) -> dict[str, list[int]]:
    """What changes when somebody writes to a file, in whatever way."""
    found = {}
    for path in _files(folder):
        about = path.stat()
        found[path.name] = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
    return found


def _files(folder: Path) -> Iterator[Path]:
    """All files but the note of the last check and what lies hidden."""
    for path in sorted(folder.iterdir()):
        if path.name != _STAMP_FILE and not path.name.startswith("."):
            yield path


def _hash(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()
