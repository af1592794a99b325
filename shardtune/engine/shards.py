"""A rank's shard of a divided tensor: where it lies in the whole, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardtune.core.tensor_shards import Region, TensorShard, part_of
from shardtune.engine.dtensor import local


class ShardPlace(NamedTuple):
    """The region that a rank holds, and which of how many equal holders it is."""

    region: Region
    copy: int
    copies: int


class ShardRegions(NamedTuple):
    """A rank's shard as regions of the whole that lie side by side in it, along `dim`."""

    dim: int
    regions: Sequence[Region]


def shard_place(tensor: Tensor) -> ShardPlace:
    """Where this rank's shard of a tensor lies; an undivided one is whole on one rank."""
    begin, extent = [0] * tensor.ndim, list(tensor.shape)
    copy, copies = 0, 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        placed = list(enumerate(tensor.placements))
        # A strided axis cuts what the axes after it have left over: FSDP below tensor parallelism.
        for axis, placement in sorted(placed, key=lambda item: isinstance(item[1], _StridedShard)):
            size, mine = mesh.size(axis), coordinate[axis]
            if placement.is_replicate():
                copy, copies = copy * size + mine, copies * size
                continue
            dim: int = placement.dim  # type: ignore[attr-defined]
            each = -(-extent[dim] // size)  # as torch.chunk cuts: the last may be short or empty
            first = min(mine * each, extent[dim])
            begin[dim] += first
            extent[dim] = min(each, extent[dim] - first)
    return ShardPlace(Region(tuple(begin), tuple(extent)), copy, copies)


def shards_of(
    name: str, parameter: Tensor, moments: Mapping[str, Tensor], regions: ShardRegions
) -> list[TensorShard]:
    """A rank's shards of a weight and of its moments. Who holds the first element has the count of
    steps, too."""
    found = []
    first = any(region.size and not any(region.begin) for region in regions.regions)
    for kind, value in {"weight": parameter.detach(), **moments}.items():
        key = f"{kind}.{name}"
        if value.ndim == 0:
            found += [TensorShard(key, (), Region.whole(()), value)] if first else []
            continue
        lengths = [region.extent[regions.dim] for region in regions.regions]
        parts = torch.split(local(value), lengths, regions.dim)
        found += [
            TensorShard(key, tuple(parameter.shape), region, part)
            for region, part in zip(regions.regions, parts, strict=True)
            if region.size
        ]
    return found


def load_shard(
    tensors: Mapping[str, Tensor], key: str, example: Tensor, regions: ShardRegions
) -> Tensor:
    """This rank's shard of a stored tensor, on the device of `example`; a copy."""
    parts = [part_of(tensors, key, region) for region in regions.regions]
    value = parts[0] if len(parts) == 1 else torch.cat(parts, regions.dim)
    return value.to(local(example).device, copy=True)
