"""A folder of files that others wrote for us, with a manifest by which damage shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from shardtune.checkpoint.hashed_file import HASH_CHUNK, FileDigest, find_damage
from shardtune.checkpoint.manifest import FORMAT, MANIFEST_FILE, Damaged, seal, unseal


def seal_folder(folder: Path) -> None:
    """Adds a manifest of all files in it."""
    files = {path.name: asdict(_written(path)) for path in sorted(folder.iterdir())}
    text = seal({"format": FORMAT, "kind": "folder", "files": files})
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def files_of(folder: Path) -> dict[str, FileDigest]:
    """What the manifest lists; Damaged if it isn't what was written."""
    body = unseal(folder / MANIFEST_FILE)
    files = body.get("files") if body.get("kind") == "folder" else None
    if not isinstance(files, dict) or any("/" in name or name in (".", "..") for name in files):
        raise Damaged(f"{MANIFEST_FILE} is not that of a result")
    return {
        str(name): FileDigest(int(each["bytes"]), str(each["sha256"]))
        for name, each in files.items()
    }


def folder_faults(folder: Path, files: dict[str, FileDigest]) -> Iterator[str]:
    """What is wrong with a sealed folder; every byte is read."""
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    for name in sorted(there - files.keys() - {MANIFEST_FILE}):
        yield f"{name} does not belong to it"
    for name in sorted(files):
        if wrong := find_damage(folder / name, files[name]):
            yield f"{name} {wrong}"


def _written(path: Path) -> FileDigest:
    digest, size = sha256(), 0
    with path.open("rb") as file:
        while block := file.read(HASH_CHUNK):
            digest.update(block)
            size += len(block)
    return FileDigest(size, digest.hexdigest())
