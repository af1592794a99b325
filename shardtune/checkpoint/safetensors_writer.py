"""Files of tensors, in the safetensors format, hashed while they are written.

The format is a length, a JSON header and the bytes of the tensors. We write it ourselves: the
library's writer needs a second pass for the hash, and holds Python's lock while it writes, which
would hold up the training that goes on meanwhile. Reading is the library's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtune.checkpoint.hashed_file import HASH_CHUNK, FileDigest, write_file

SAFETENSORS_DTYPES = {
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


def write_safetensors(
    path: Path, tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> FileDigest:
    """Writes the tensors to a new file and returns when they are on the disk."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    start = memoryview(len(text).to_bytes(8, "little") + text)
    return write_file(
        path, chain([start], (block for _, each in tensors for block in byte_blocks(each)))
    )


def byte_blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in pieces of bounded size."""
    if tensor.numel() == 0:
        return
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = memoryview(flat.numpy())  # type: ignore[arg-type]
    for begin in range(0, len(data), HASH_CHUNK):
        yield data[begin : begin + HASH_CHUNK]
