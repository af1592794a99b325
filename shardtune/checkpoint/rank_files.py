"""What one rank writes of a checkpoint: its pieces, in files of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardtune.checkpoint.hashed_file import FileDigest
from shardtune.checkpoint.manifest import (
    StoredPiece,
    StoredTensor,
    merge_tensors,
    shard_metadata,
    tensor_from,
)
from shardtune.checkpoint.safetensors_writer import SAFETENSORS_DTYPES, write_safetensors
from shardtune.core.tensor_shards import Piece

FILE_SIZE = 2 << 30  # bytes of a file at most, unless one tensor is larger


@dataclass(frozen=True)
class RankFiles:
    """The files that a rank wrote, and the tensors in them."""

    files: Mapping[str, FileDigest]
    tensors: Mapping[str, StoredTensor]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> RankFiles:
        files = {name: FileDigest(**each) for name, each in body["files"].items()}
        return RankFiles(files, {key: tensor_from(each) for key, each in body["tensors"].items()})


def write_rank_files(
    folder: Path,
    pieces: Iterable[Piece],
    *,
    run: str,
    step: int,
    rank: int,
    file_size: int = FILE_SIZE,
) -> RankFiles:
    """Writes the pieces, and returns when they are on the disk."""
    files: dict[str, FileDigest] = {}
    parts: list[dict[str, StoredTensor]] = []
    for number, some in enumerate(_in_files(pieces, file_size)):
        file = f"rank-{rank:05d}-{number:03d}.safetensors"
        named = [(_name(piece), piece) for piece in some]
        files[file] = write_safetensors(
            folder / file,
            [(name, piece.value()) for name, piece in named],
            shard_metadata(run, step, rank),
        )
        parts += (
            {
                piece.key: StoredTensor(
                    piece.shape,
                    SAFETENSORS_DTYPES[piece.tensor.dtype],
                    (StoredPiece(file, name, piece.cut),),
                )
            }
            for name, piece in named
        )
    return RankFiles(files, merge_tensors(parts))


def _in_files(pieces: Iterable[Piece], size: int) -> list[list[Piece]]:
    files: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not files or piece.bytes > room:
            files.append([])
            room = size
        files[-1].append(piece)
        room -= piece.bytes
    return files


def _name(piece: Piece) -> str:
    """What a piece is called in its file: the tensor's key, and which part of it if it is one."""
    if piece.cut.extent == piece.shape and not piece.cut.flat:
        return piece.key
    spans = (f"{b}:{b + n}" for b, n in zip(piece.cut.begin, piece.cut.extent, strict=True))
    return f"{piece.key}[{'flat ' * piece.cut.flat}{','.join(spans)}]"


def encode_answer(answer: RankFiles | str) -> str:
    """A rank's report as text for the others: its share, or what went wrong."""
    return json.dumps(answer if isinstance(answer, str) else answer.to_json())


def decode_answer(text: str) -> RankFiles | str:
    body = json.loads(text)
    return body if isinstance(body, str) else RankFiles.from_json(body)
