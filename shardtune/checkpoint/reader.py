"""Reads a checkpoint: any tensor, or any part of one, whoever wrote it in whichever shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardtune.checkpoint.manifest import Manifest, StoredShard
from shardtune.checkpoint.safetensors_writer import SAFETENSORS_DTYPES
from shardtune.core.tensor_shards import Region, TensorShard
from shardtune.errors import Problem, RunError

_TORCH = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


class Reader(Mapping[str, Tensor]):
    """The tensors of a checkpoint by key. Each is read when it is asked for, and not kept."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._open: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Tensor:
        stored = self.manifest.tensors[key]
        if len(stored.pieces) == 1 and not stored.pieces[0].cut.flat:
            return self._read(stored.pieces[0])
        whole = torch.empty(stored.shape, dtype=_TORCH[stored.dtype])
        for shard in stored.pieces:
            _room(whole, shard.cut).copy_(self._read(shard))
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)

    def part(self, key: str, region: Region) -> Tensor:
        """What lies in `region` of a tensor. Only the shards that it meets are read, if none
        has gaps; else the whole tensor is put together first."""
        stored = self.manifest.tensors[key]
        wanted = region.flat_range(stored.shape)
        spans = [shard.cut.flat_range(stored.shape) for shard in stored.pieces]
        if wanted is None or None in spans:
            return _room(self[key], region).clone()
        first, end = wanted
        found = torch.empty(end - first, dtype=_TORCH[stored.dtype])
        for shard, span in zip(stored.pieces, spans, strict=True):
            assert span is not None
            begin, stop = max(first, span[0]), min(end, span[1])
            if begin < stop:
                some = self._flat_range(shard, begin - span[0], stop - span[0])
                found[begin - first : stop - first] = some
        return found.view(region.extent)

    def _flat_range(self, shard: StoredShard, begin: int, end: int) -> Tensor:
        """Elements of a shard laid out flat. Rows that aren't asked for are not read."""
        extent = shard.cut.extent
        if not extent:
            return self._read(shard).reshape(-1)
        row = shard.cut.size // extent[0]
        top, bottom = begin // row, -(-end // row)
        stored_rows = self._in_file(shard, lambda file: file.get_slice(shard.name))
        rows: Tensor = stored_rows[top:bottom].reshape(-1)
        return rows[begin - top * row : end - top * row]

    def _read(self, shard: StoredShard) -> Tensor:
        found: Tensor = self._in_file(shard, lambda file: file.get_tensor(shard.name))
        return found

    def _in_file(self, shard: StoredShard, ask: Callable[[Any], Any]) -> Any:
        """What a file answers about a shard. Its bytes are those that were written, but somebody
        may have sealed what isn't a checkpoint."""
        path = self.folder / shard.file
        try:
            if shard.file not in self._open:
                self._open[shard.file] = safe_open(path, framework="pt", device="cpu")
            file = self._open[shard.file]
            if tuple(file.get_slice(shard.name).get_shape()) != shard.cut.extent:
                raise SafetensorError(f"{shard.name} has another shape than the manifest says")
            return ask(file)
        except (OSError, SafetensorError) as error:
            fix = "this is not what a save leaves; begin from a checkpoint that you trust"
            raise RunError(Problem(str(path), f"can't be read: {error}", fix)) from None

    def refuse_other_weights(self, mine: Mapping[str, TensorShard]) -> None:
        """The checkpoint has to hold the weights that this rank has a shard of, in their shape."""
        problems = []
        for key, shard in mine.items():
            stored = self.manifest.tensors.get(key)
            if stored is None or stored.shape != shard.shape:
                have = f"{stored.shape} in the checkpoint" if stored else "not in the checkpoint"
                fact = f"{key} is {shard.shape} in the model and {have}"
                fix = "resume with the model and adapter that the run was begun with"
                problems.append(Problem(str(self.folder), fact, fix))
        if problems:
            raise RunError(problems[:5])


def _room(whole: Tensor, region: Region) -> Tensor:
    """The place of a region in a whole tensor."""
    place = whole.view(-1) if region.flat else whole
    for dim, (begin, extent) in enumerate(zip(region.begin, region.extent, strict=True)):
        place = place.narrow(dim, begin, extent)
    return place
