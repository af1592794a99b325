"""A rank's share of a divided tensor: where it lies in the whole, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardtune.core.tensor_shards import Cut, Piece, part_of
from shardtune.engine.dtensor import local


class Place(NamedTuple):
    """The box that a rank holds, and which of how many equal holders it is."""

    cut: Cut
    copy: int
    copies: int


class Boxes(NamedTuple):
    """A rank's share as boxes of the whole that lie side by side in it, along `dim`."""

    dim: int
    cuts: Sequence[Cut]


def place_of(tensor: Tensor) -> Place:
    """Where this rank's share of a tensor lies; an undivided one is whole on one rank."""
    begin, extent = [0] * tensor.ndim, list(tensor.shape)
    copy, copies = 0, 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        placed = list(enumerate(tensor.placements))
        # A strided axis cuts what the axes after it have left over: shares of slices.
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
    return Place(Cut(tuple(begin), tuple(extent)), copy, copies)


def pieces_of(
    name: str, parameter: Tensor, moments: Mapping[str, Tensor], boxes: Boxes
) -> list[Piece]:
    """A rank's pieces of a weight and of its moments. Who holds the first element has the count of
    steps, too."""
    found = []
    first = any(cut.size and not any(cut.begin) for cut in boxes.cuts)
    for kind, value in {"weight": parameter.detach(), **moments}.items():
        key = f"{kind}.{name}"
        if value.ndim == 0:
            found += [Piece(key, (), Cut.whole(()), value)] if first else []
            continue
        lengths = [cut.extent[boxes.dim] for cut in boxes.cuts]
        parts = torch.split(local(value), lengths, boxes.dim)
        found += [
            Piece(key, tuple(parameter.shape), cut, part)
            for cut, part in zip(boxes.cuts, parts, strict=True)
            if cut.size
        ]
    return found


def share_from(tensors: Mapping[str, Tensor], key: str, example: Tensor, boxes: Boxes) -> Tensor:
    """This rank's share of a stored tensor, on the device of `example`; a copy."""
    parts = [part_of(tensors, key, cut) for cut in boxes.cuts]
    value = parts[0] if len(parts) == 1 else torch.cat(parts, boxes.dim)
    return value.to(local(example).device, copy=True)
