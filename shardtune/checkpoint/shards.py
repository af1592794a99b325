"""Files of tensors, in the safetensors format, hashed while they are written.

The format is a length, a JSON header and the bytes of the tensors. We write it ourselves: the
library's writer needs a second pass for the hash, and holds Python's lock while it writes, which
would hold up the training that goes on meanwhile. Reading is the library's.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 8 << 20  # bytes that are written and hashed at a time
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LONGEST_HEADER = 100 << 20  # what the library accepts


@dataclass(frozen=True)
class Written:
    """What a file must be like to be the one that was written."""

    bytes: int
    sha256: str


def write_shard(
    path: Path, tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> Written:
    """Writes the tensors to a new file and returns when they are on the disk."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    start = memoryview(len(text).to_bytes(8, "little") + text)
    return write_file(
        path, chain([start], (block for _, each in tensors for block in blocks_of(each)))
    )


def write_file(path: Path, blocks: Iterator[memoryview] | Sequence[memoryview]) -> Written:
    """Writes a new file, and returns when it is on the disk."""
    digest, size = sha256(), 0
    with path.open("xb", buffering=0) as file:
        for block in blocks:
            digest.update(block)
            size += len(block)
            while len(block):
                block = block[file.write(block) :]
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def blocks_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in pieces of bounded size."""
    if tensor.numel() == 0:
        return
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = memoryview(flat.numpy())  # type: ignore[arg-type]
    for begin in range(0, len(data), CHUNK):
        yield data[begin : begin + CHUNK]


def difference(path: Path, expected: Written, metadata: Mapping[str, str] | None = None) -> str:
    """What is wrong with a file, or nothing. Every byte is read; a link is not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be opened: {error.strerror}" if not path.is_symlink() else "is a link"
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return "is no file"
        if about.st_size != expected.bytes:
            found = f"has {about.st_size:,} bytes instead of {expected.bytes:,}"
        else:
            try:
                if _hash(file) == expected.sha256:
                    return ""
            except OSError as error:
                return f"can't be read: {error.strerror}"
            found = "has other content than was written (SHA-256 differs)"
        return found + _whose(file, metadata or {})


def _hash(file: Any) -> str:
    digest, buffer = sha256(), bytearray(CHUNK)
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
