"""Rank files: what one rank writes of a checkpoint: its shards, in files of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shardtune.checkpoint.hashed_file import FileDigest
from shardtune.checkpoint.manifest import (
    StoredShard,
    StoredTensor,
    merge_tensors,
    shard_metadata,
    tensor_from,
)
from shardtune.checkpoint.safetensors_writer import SAFETENSORS_DTYPES, write_safetensors
from shardtune.core.tensor_shards import TensorShard

FILE_SIZE = 2 << 30  # bytes of a file at most, unless one tensor is larger


@dataclass(frozen=True)
class RankFiles:
    """The files that a rank wrote, and the tensors in them."""

    files: Mapping[str, FileDigest]
    tensors: Mapping[str, StoredTensor]


def write_rank_files(
    folder: Path,
    shards: Iterable[TensorShard],
    *,
    run: str,
    step: int,
    rank: int,
    file_size: int = FILE_SIZE,
) -> RankFiles:
    """Writes the shards, and returns when they are on the disk."""
    files: dict[str, FileDigest] = {}
    parts: list[dict[str, StoredTensor]] = []
    for number, some in enumerate(_in_files(shards, file_size)):
        file = f"rank-{rank:05d}-{number:03d}.safetensors"
        named = [(_name(shard), shard) for shard in some]
        files[file] = write_safetensors(
            folder / file,
            [(name, shard.value()) for name, shard in named],
            shard_metadata(run, step, rank),
        )
        parts += (
            {
                shard.key: StoredTensor(
                    shard.shape,
                    SAFETENSORS_DTYPES[shard.tensor.dtype],
                    (StoredShard(file, name, shard.region),),
                )
            }
            for name, shard in named
        )
    return RankFiles(files, merge_tensors(parts))


def _in_files(shards: Iterable[TensorShard], size: int) -> list[list[TensorShard]]:
    files: list[list[TensorShard]] = []
    room = 0
    for shard in shards:
        if not files or shard.bytes > room:
            files.append([])
            room = size
        files[-1].append(shard)
        room -= shard.bytes
    return files


def _name(shard: TensorShard) -> str:
    """What a shard is called in its file: the tensor's key, and which part of it if it is one."""
    if shard.region.extent == shard.shape and not shard.region.flat:
        return shard.key
    spans = (f"{b}:{b + n}" for b, n in zip(shard.region.begin, shard.region.extent, strict=True))
    return f"{shard.key}[{'flat ' * shard.region.flat}{','.join(spans)}]"


def encode_answer(answer: RankFiles | str) -> str:
    """A rank's report as text for the others: its share, or what went wrong."""
    return json.dumps(answer if isinstance(answer, str) else asdict(answer))


def decode_answer(text: str) -> RankFiles | str:
    body = json.loads(text)
    if isinstance(body, str):
        return body
    files = {name: FileDigest(**each) for name, each in body["files"].items()}
    return RankFiles(files, {key: tensor_from(each) for key, each in body["tensors"].items()})
