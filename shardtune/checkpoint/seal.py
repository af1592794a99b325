"""A folder of files that others wrote for us, with a manifest by which damage shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from shardtune.checkpoint.hashed_file import CHUNK, Written, difference
from shardtune.checkpoint.manifest import FORMAT, NAME, Damaged, sealed, unsealed


def seal_folder(folder: Path) -> None:
    """Adds a manifest of all files in it."""
    files = {path.name: asdict(_written(path)) for path in sorted(folder.iterdir())}
    text = sealed({"format": FORMAT, "kind": "folder", "files": files})
    (folder / NAME).write_text(text, encoding="utf-8")


def files_of(folder: Path) -> dict[str, Written]:
    """What the manifest lists; Damaged if it isn't what was written."""
    body = unsealed(folder / NAME)
    files = body.get("files") if body.get("kind") == "folder" else None
    if not isinstance(files, dict) or any("/" in name or name in (".", "..") for name in files):
        raise Damaged(f"{NAME} is not that of a result")
    return {
        str(name): Written(int(each["bytes"]), str(each["sha256"])) for name, each in files.items()
    }


def folder_faults(folder: Path, files: dict[str, Written]) -> Iterator[str]:
    """What is wrong with a sealed folder; every byte is read."""
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    for name in sorted(there - files.keys() - {NAME}):
        yield f"{name} does not belong to it"
    for name in sorted(files):
        if wrong := difference(folder / name, files[name]):
            yield f"{name} {wrong}"


def _written(path: Path) -> Written:
    digest, size = sha256(), 0
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
            size += len(block)
    return Written(size, digest.hexdigest())
