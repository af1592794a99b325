"""Writes a GGUF file, one tensor at a time, and reads it back.

A tensor is quantized in blocks of 32 numbers by the `gguf` package. How far a number may then be
off follows from the format: `rounding_bounds` has the formula, and the file is refused if a single
number is further off, a key has another value, or a tensor is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtune.errors import Problem, RunError
from shardtune.export.gguf_hyperparameters import GgufMetadata, GgufValue

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
"""What weights can be written in: what the `gguf` package can quantize."""
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "bf16": 32}
"""llama.cpp's numbers for a file of mostly that type."""
BLOCK = 32

NamedTensors = Callable[[], Iterable[tuple[str, "Tensor"]]]
"""Makes the tensors of a file anew, one at a time: once to write them, once to compare."""


@dataclass(frozen=True)
class GgufReadBack:
    """What was compared."""

    tensors: int
    keys: int
    bytes: int
    largest_error: float
    """Of a weight, as a share of the largest weight of its tensor."""


def require_gguf_package() -> None:
    if importlib.util.find_spec("gguf") is None:
        fact = "this Python package, which writes GGUF files, is not installed"
        raise RunError(Problem("gguf", fact, "pip install 'shardtune[gguf]'"))


def file_type(kind: str) -> int:
    return _FILE_TYPES[kind]


def write_gguf(
    path: Path, architecture: str, metadata: GgufMetadata, tensors: NamedTensors, kind: str
) -> None:
    """Writes the file. Weights are written as `kind`, norms and other vectors in fp32."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors():  # shapes alone: the header stands before the weights
        chosen = chosen_type(tensor, kind)
        traits = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[chosen.upper()]]
        size = tensor.numel() // traits[0] * traits[1]
        raw = gguf.GGMLQuantizationType[chosen.upper()]
        writer.add_tensor_info(name, tuple(tensor.shape), np.dtype(np.float32), size, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in tensors():
        chosen = chosen_type(tensor, kind)
        array = np.ascontiguousarray(tensor.numpy())
        writer.write_tensor_data(gguf.quantize(array, gguf.GGMLQuantizationType[chosen.upper()]))
    writer.close()


def check_gguf(
    path: Path, metadata: GgufMetadata, tensors: NamedTensors, kind: str
) -> GgufReadBack:
    """Refuses a file that isn't what was to be written; every byte of it is read."""
    reader = open_reader(path)
    _compare_metadata(path, reader, metadata)
    stored = {each.name: each for each in reader.tensors}
    largest, count = 0.0, 0
    for name, tensor in tensors():
        if name not in stored:
            raise _wrong(path, f"{name} is missing")
        largest = max(largest, _compare_tensor(path, stored.pop(name), tensor, kind))
        count += 1
    if stored:
        raise _wrong(path, f"{next(iter(stored))} does not belong to it")
    return GgufReadBack(count, len(metadata), path.stat().st_size, largest)


def open_reader(path: Path) -> Any:
    """A `GGUFReader`; RunError for a file that it can't read."""
    import gguf

    try:
        return gguf.GGUFReader(path)
    except (ValueError, OSError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise _wrong(path, f"can't be read as GGUF: {error}") from None


def read_metadata(reader: Any) -> GgufMetadata:
    """The keys and values of a file, without those that count its parts."""
    own = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
    return {name: field.contents() for name, field in reader.fields.items() if name not in own}


def rounding_bounds(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """How far each number may be off, by what it is written in.

    A block's scale is its largest number over the highest level. A number is off by half a step;
    with 4 or 5 bits by a whole one, because there is no level as high as the lowest is low. The
    scale is kept in fp16, and its own rounding counts once for each level.
    """
    size = np.abs(values)
    if kind == "f32":
        return np.zeros_like(size)
    if kind in ("f16", "bf16"):
        digits, smallest = (11, 2.0**-25) if kind == "f16" else (8, 2.0**-134)
        return np.asarray(size * 2.0**-digits + smallest, dtype=np.float32)
    levels, steps = {"q8_0": (127, 0.5), "q5_0": (16, 1.0), "q4_0": (8, 1.0)}[kind]
    blocks = size.reshape(-1, BLOCK).max(axis=1, keepdims=True)
    scale = blocks / levels
    bound = scale * (steps + 1e-4) + levels * (scale * 2.0**-11 + 2.0**-25)
    return np.asarray(np.broadcast_to(bound, (len(bound), BLOCK)).reshape(values.shape), np.float32)


def chosen_type(tensor: Tensor, kind: str) -> str:
    """What one tensor is written in: vectors in fp32, rows that are no whole blocks in fp16."""
    if tensor.ndim < 2 or kind == "f32":
        return "f32"
    return kind if not kind.startswith("q") or tensor.shape[-1] % BLOCK == 0 else "f16"


def _compare_tensor(path: Path, stored: Any, tensor: Tensor, kind: str) -> float:
    import gguf

    chosen = chosen_type(tensor, kind)
    if stored.tensor_type.name.lower() != chosen:
        raise _wrong(path, f"{stored.name} is {stored.tensor_type.name}, not {chosen.upper()}")
    found = gguf.dequantize(stored.data, stored.tensor_type).reshape(-1)
    wanted = np.ascontiguousarray(tensor.numpy()).reshape(-1)
    if found.shape != wanted.shape:
        raise _wrong(path, f"{stored.name} has {found.size} numbers, not {wanted.size}")
    off = np.abs(found - wanted)
    bounds = rounding_bounds(wanted, chosen)
    wrong = ~(off <= bounds)  # so that it is refused also when it isn't a number
    if wrong.any():
        place = int(wrong.argmax())
        by = f"{off[place]:.3g} off at {place}; {chosen.upper()} explains {bounds[place]:.3g}"
        raise _wrong(path, f"{stored.name} is {by}")
    return float(off.max() / max(float(np.abs(wanted).max()), 1e-30))


def _compare_metadata(path: Path, reader: Any, metadata: GgufMetadata) -> None:
    found = read_metadata(reader)
    for key, value in metadata.items():
        if key not in found:
            raise _wrong(path, f"the key {key} is missing")
        if not _same(found[key], value):
            raise _wrong(path, f"{key} is {_short(found[key])}, not {_short(value)}")
    if others := sorted(found.keys() - metadata.keys() - {"general.architecture"}):
        raise _wrong(path, f"the key {others[0]} does not belong to it")


def _same(found: Any, value: GgufValue) -> bool:
    if isinstance(value, float):
        return bool(found == np.float32(value))
    if isinstance(value, list) and value and isinstance(value[0], float):
        return bool(np.array_equal(np.array(found, np.float32), np.array(value, np.float32)))
    return bool(found == value)


def _add(writer: Any, key: str, value: GgufValue) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _wrong(path: Path, fact: str) -> RunError:
    return RunError(Problem(path.name, fact, "write it again: shardtune export RUN --to gguf DIR"))


def gguf_weights_of(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor of a file in fp32."""
    import gguf

    for stored in open_reader(path).tensors:
        shape = tuple(reversed([int(size) for size in stored.shape]))
        yield stored.name, gguf.dequantize(stored.data, stored.tensor_type).reshape(shape)
