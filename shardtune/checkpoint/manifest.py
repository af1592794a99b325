"""The manifest: what a checkpoint consists of, to the byte, and what it means.

It is the last file to be written, and it is sealed: a file that isn't exactly what we would write
for what it says is not believed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardtune.checkpoint.hashed_file import FileDigest
from shardtune.core.files.regular_file import NotAFile, read_regular
from shardtune.core.progress import Progress
from shardtune.core.tensor_shards import Region

FORMAT = 1
MANIFEST_FILE = "manifest.json"
SHARD_FILE = re.compile(r"rank-\d{5}-\d{3,}\.safetensors")
_LARGEST = 1 << 30


class Damaged(Exception):
    """Something on the disk isn't what was written. Says what; not shown to a person as it is."""


class NewerFormat(Exception):
    """Written by a later version than this one."""


@dataclass(frozen=True)
class StoredShard:
    """A shard, and the file and the name under which it lies there."""

    file: str
    name: str
    cut: Region


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, in shards; the fields are called as in manifest.json."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredShard, ...]

    def gap(self) -> str:
        """What is wrong with the shards: together they have to be the whole, each element once."""
        if not all(shard.cut.fits(self.shape) for shard in self.pieces):
            return "has a shard outside of its shape"
        size = math.prod(self.shape)
        if (found := sum(shard.cut.size for shard in self.pieces)) != size:
            return f"has {found:,} of {size:,} elements"
        ends = [shard.cut.flat_range(self.shape) for shard in self.pieces if shard.cut.size]
        if None in ends:
            boxes = [shard.cut for shard in self.pieces]
            if any(box.flat for box in boxes):
                return "has boxes and flat ranges"
            return "has shards that overlap" if _overlap(boxes) else ""
        ordered = sorted(end for end in ends if end is not None)
        apart = all(one[1] <= two[0] for one, two in pairwise(ordered))
        return "" if apart else "has shards that overlap"


def _overlap(boxes: list[Region]) -> bool:
    return any(
        all(
            max(a, b) < min(a + m, b + n)
            for a, m, b, n in zip(one.begin, one.extent, two.begin, two.extent, strict=True)
        )
        for number, one in enumerate(boxes)
        for two in boxes[:number]
    )


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. `step` is also the position in the data: the order is a function of it."""

    run: str
    step: int
    ranks: int
    strategy: str
    job: str
    """Digest of the job that ran."""
    progress: Progress
    numbers: Mapping[str, float]
    files: Mapping[str, FileDigest]
    tensors: Mapping[str, StoredTensor]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def metadata(self, file: str) -> dict[str, str]:
        """What a shard says about itself, in its own header."""
        return shard_metadata(self.run, self.step, int(file.split("-")[1]))

    def gaps(self) -> list[str]:
        """Tensors that aren't whole."""
        return [f"{key} {gap}" for key, each in self.tensors.items() if (gap := each.gap())]


def shard_metadata(run: str, step: int, rank: int) -> dict[str, str]:
    return {"run": run, "step": str(step), "rank": str(rank)}


def seal(body: Mapping[str, Any]) -> str:
    """A JSON document with its own digest."""
    text = _canonical(body)
    return _canonical({**body, "seal": sha256(text.encode()).hexdigest()}) + "\n"


def unseal(path: Path) -> dict[str, Any]:
    """The document, if it is exactly as `seal` wrote it."""
    try:
        # To the byte: no newline is translated.
        text = read_regular(path, _LARGEST, follow_links=False).decode()
        body: dict[str, Any] = json.loads(text)
        body.pop("seal")
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except (NotAFile, IsADirectoryError) as error:
        raise Damaged(f"{path.name} {error.strerror}") from None
    except OSError as error:
        raise Damaged(f"{path.name} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{path.name} is not what was written") from None
    if seal(body) != text:
        raise Damaged(f"{path.name} is not what was written (its seal is broken)")
    return body


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def render(manifest: Manifest) -> str:
    """The text of manifest.json."""
    body = asdict(manifest) | {"progress": manifest.progress.facts()}
    return seal({"format": FORMAT, "kind": "checkpoint", **body})


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`; Damaged if it is not what was written, Newer if we can't know."""
    body = unseal(folder / MANIFEST_FILE)
    if body.get("kind") != "checkpoint":
        raise Damaged(f"{MANIFEST_FILE} is not a checkpoint's")
    if body.get("format", 0) > FORMAT:
        raise NewerFormat(f"is written in format {body['format']}; this version reads {FORMAT}")
    # The seal holds: what follows is as we wrote it, but for somebody who seals his own.
    try:
        manifest = Manifest(
            run=str(body["run"]),
            step=int(body["step"]),
            ranks=int(body["ranks"]),
            strategy=str(body["strategy"]),
            job=str(body["job"]),
            progress=Progress.resumed(int(body["step"]), dict(body["progress"])),
            numbers={str(key): float(value) for key, value in body["numbers"].items()},
            files={name: FileDigest(**each) for name, each in body["files"].items()},
            tensors={key: tensor_from(each) for key, each in body["tensors"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Damaged(f"{MANIFEST_FILE} lacks what a checkpoint has") from None
    if not all(SHARD_FILE.fullmatch(name) for name in manifest.files):
        raise Damaged(f"{MANIFEST_FILE} names files that are none of a checkpoint's")
    known = manifest.files.keys()
    if not {p.file for each in manifest.tensors.values() for p in each.pieces} <= known:
        raise Damaged(f"{MANIFEST_FILE} has tensors in files that it doesn't list")
    if gaps := manifest.gaps():
        raise Damaged(f"{MANIFEST_FILE}: {gaps[0]}")
    return manifest


def tensor_from(body: Mapping[str, Any]) -> StoredTensor:
    """The inverse of `asdict` for a tensor that was sent or stored as JSON."""
    shards = tuple(
        StoredShard(
            str(shard["file"]),
            str(shard["name"]),
            Region(
                tuple(map(int, shard["cut"]["begin"])),
                tuple(map(int, shard["cut"]["extent"])),
                bool(shard["cut"]["flat"]),
            ),
        )
        for shard in body["pieces"]
    )
    return StoredTensor(tuple(map(int, body["shape"])), str(body["dtype"]), shards)


def merge_tensors(parts: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """The tensors of all ranks; shards of one tensor come together."""
    found: dict[str, StoredTensor] = {}
    for part in parts:
        for key, each in part.items():
            before = found.get(key)
            shards = (*before.pieces, *each.pieces) if before else each.pieces
            found[key] = StoredTensor(each.shape, each.dtype, shards)
    return found
