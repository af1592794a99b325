"""A rank's share of a divided tensor: where it lies in the whole, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from shardtune.core.pieces import Cut, Piece, part_of
from shardtune.engines.tensors import local


class Place(NamedTuple):
    """The cut that a rank holds, and which of how many equal holders it is."""

    cut: Cut
    copy: int
    copies: int


def place_of(tensor: Tensor) -> Place:
    """Where this rank's share of a tensor lies; an undivided one is whole on one rank."""
    begin, extent = [0] * tensor.ndim, list(tensor.shape)
    copy, copies = 0, 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(tensor.placements):
            size, mine = mesh.size(axis), coordinate[axis]
            if isinstance(placement, Shard):
                dim = placement.dim
                each = -(
                    -extent[dim] // size
                )  # as torch.chunk cuts: the last may be short or empty
                first = min(mine * each, extent[dim])
                begin[dim] += first
                extent[dim] = min(each, extent[dim] - first)
            else:
                copy, copies = copy * size + mine, copies * size
    return Place(Cut(tuple(begin), tuple(extent)), copy, copies)


def divided_pieces(
    trained: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]
) -> list[Piece]:
    """The pieces that this rank saves of weights that are divided, and of their moments.

    A share that several ranks hold is saved by one of them, another one for each weight.
    """
    found = []
    for number, (name, parameter) in enumerate(trained.items()):
        cut, copy, copies = place_of(parameter)
        if number % copies != copy:
            continue
        shape = tuple(parameter.shape)
        kept = {"weight": parameter.detach(), **moments[name]}
        for kind, value in kept.items():
            if value.ndim == 0:  # a count, which every rank has
                if cut.size and not any(cut.begin):
                    found.append(Piece(f"{kind}.{name}", (), Cut.whole(()), value))
            elif cut.size:
                found.append(Piece(f"{kind}.{name}", shape, cut, local(value)))
    return found


def share_from(tensors: Mapping[str, Tensor], key: str, example: Tensor) -> Tensor:
    """This rank's share of a stored tensor that is to be divided as `example` is; a copy."""
    value = part_of(tensors, key, place_of(example).cut)
    return value.to(local(example).device, copy=True)


def divided_like(share: Tensor, example: Tensor) -> Tensor:
    """A rank's share as the divided tensor that it is part of."""
    if not isinstance(example, DTensor):
        return share
    return DTensor.from_local(
        share,
        example.device_mesh,
        example.placements,
        run_check=False,
        shape=torch.Size(example.shape),
        stride=example.stride(),
    )
