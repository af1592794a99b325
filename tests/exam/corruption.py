"""Ways in which a checkpoint on a disk goes bad, drawn at random."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from shardtune.checkpoint.manifest import MANIFEST_FILE

Corruption = Callable[[random.Random, Path, Path], None]


def files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.iterdir())


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def flip(draw: random.Random, checkpoint: Path, other: Path) -> None:
    path = draw.choice(files(checkpoint))
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(draw: random.Random, checkpoint: Path, other: Path) -> None:
    path = draw.choice(files(checkpoint))
    data = path.read_bytes()
    path.write_bytes(data[: draw.choice([0, len(data) // 2, len(data) - 1])])


def grow(draw: random.Random, checkpoint: Path, other: Path) -> None:
    with draw.choice(files(checkpoint)).open("ab") as file:
        file.write(draw.choice([b"\0", b"\n", b" ", b"}" * 9]))


def zero(draw: random.Random, checkpoint: Path, other: Path) -> None:
    """A block that never reached the disk, as after a loss of power without fsync."""
    path = draw.choice(files(checkpoint))
    data = bytearray(path.read_bytes())
    begin = draw.randrange(len(data))
    data[begin:] = bytes(len(data) - begin)
    if data == path.read_bytes():  # it ended with zeros
        data[0] ^= 1
    path.write_bytes(data)


def delete(draw: random.Random, checkpoint: Path, other: Path) -> None:
    draw.choice(files(checkpoint)).unlink()


def duplicate(draw: random.Random, checkpoint: Path, other: Path) -> None:
    path = draw.choice(shards(checkpoint))
    shutil.copy(path, checkpoint / f"rank-{draw.randrange(7, 99):05d}-000.safetensors")


def swap(draw: random.Random, checkpoint: Path, other: Path) -> None:
    one, two = draw.sample(shards(checkpoint), 2)
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)


def overwrite(draw: random.Random, checkpoint: Path, other: Path) -> None:
    one, two = draw.sample(shards(checkpoint), 2)
    two.write_bytes(one.read_bytes())


def stale(draw: random.Random, checkpoint: Path, other: Path) -> None:
    """The same file of another step, or of another run."""
    path = draw.choice(files(checkpoint))
    path.write_bytes((other / path.name).read_bytes())


def link(draw: random.Random, checkpoint: Path, other: Path) -> None:
    """The right content, but somewhere else: whoever owns that place can change it."""
    path = draw.choice(files(checkpoint))
    target = checkpoint.parent / f"elsewhere-{path.name}"
    path.rename(target)
    path.symlink_to(target)


def rename(draw: random.Random, checkpoint: Path, other: Path) -> None:
    """The folder of another step under this one's name."""
    shutil.rmtree(checkpoint)
    shutil.copytree(other, checkpoint)


def no_manifest(draw: random.Random, checkpoint: Path, other: Path) -> None:
    (checkpoint / MANIFEST_FILE).write_text(draw.choice(["", "{}", "[]", "null", "{" * 50, "\x00"]))


CORRUPTIONS: tuple[Corruption, ...] = (
    flip, flip, flip, truncate, grow, zero, delete, duplicate, swap, overwrite, stale, link,
    rename, no_manifest,
)  # fmt: skip
"""Flipped bits come up more often than the others: any file, any place."""
