"""Shards of the training state: a rank's part of each tensor, and how parts become whole again.

A checkpoint has shards of named tensors: a box of the whole, or a flat range of its elements. Who
saves need not hold more than its own shards, and who loads may shard otherwise (resharding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Region:
    """Where a shard lies in the whole tensor: a box of it, or, `flat`, a range of its elements."""

    begin: tuple[int, ...]
    extent: tuple[int, ...]
    flat: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.extent)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it lies inside of a tensor of that shape."""
        room = (math.prod(shape),) if self.flat else shape
        return len(self.begin) == len(self.extent) == len(room) and all(
            begin >= 0 and extent >= 0 and begin + extent <= most
            for begin, extent, most in zip(self.begin, self.extent, room, strict=True)
        )

    def flat_range(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Its first element and the one after its last in the flat whole; None where it has gaps.

        A box has none if it is cut along one dimension only and nothing but ones stands before it.
        """
        if self.flat:
            return self.begin[0], self.begin[0] + self.extent[0]
        cut = [dim for dim, size in enumerate(shape) if self.extent[dim] != size]
        if cut and (cut[1:] or math.prod(shape[: cut[0]]) != 1):
            return None
        first = 0
        for begin, size in zip(self.begin, shape, strict=True):
            first = first * size + begin
        return first, first + self.size

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Region:
        return Region((0,) * len(shape), shape)


@dataclass(frozen=True)
class TensorShard:
    """What one rank saves of the tensor `key`, whose whole shape is `shape`."""

    key: str
    shape: tuple[int, ...]
    region: Region
    tensor: Tensor
    made: Callable[[], Tensor] | None = None
    """Makes what is saved when it is copied or written, where it isn't there yet; `tensor` then
    only has its form."""

    def value(self) -> Tensor:
        return self.tensor if self.made is None else self.made()

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def round_robin(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> list[TensorShard]:
    """Whole tensors for this rank to save, of those that every rank has: about as many bytes each.

    All ranks have to give the same names and sizes; nothing is sent.
    """
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
    loads = [0] * ranks
    mine = []
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        lightest = loads.index(min(loads))
        loads[lightest] += max(1, sizes[key])
        if lightest == rank:
            mine.append(key)
    return [
        TensorShard(key, shape, Region.whole(shape), tensors[key])
        for key in sorted(mine)
        for shape in [tuple(tensors[key].shape)]
    ]


@runtime_checkable
class Stored(Protocol):
    """Tensors that lie elsewhere, of which a part can be had without the rest."""

    def part(self, key: str, region: Region) -> Tensor:
        """What lies in `region` of the tensor `key`, in its extent."""
        ...


def part_of(tensors: Mapping[str, Tensor], key: str, region: Region) -> Tensor:
    """A part of a tensor, read alone where that is possible."""
    if isinstance(tensors, Stored):
        return tensors.part(key, region)
    value = tensors[key].reshape(-1) if region.flat else tensors[key]
    for dim, (begin, extent) in enumerate(zip(region.begin, region.extent, strict=True)):
        value = value.narrow(dim, begin, extent)
    return value


class OfWeight(Mapping[str, "Tensor"]):
    """What `tensors` have for one weight, by kind (`weight`, `exp_avg`); read when asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str, kinds: tuple[str, ...]) -> None:
        self._tensors, self._name, self._kinds = tensors, name, kinds

    def __getitem__(self, kind: str) -> Tensor:
        return self._tensors[f"{kind}.{self._name}"]

    def __contains__(self, kind: object) -> bool:
        return kind in self._kinds  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def by_weight(tensors: Mapping[str, Tensor]) -> dict[str, OfWeight]:
    """The state of training sorted by weight; its keys are `kind.weight`."""
    kinds: dict[str, list[str]] = {}
    for key in tensors:
        kind, name = key.split(".", 1)
        kinds.setdefault(name, []).append(kind)
    return {name: OfWeight(tensors, name, tuple(found)) for name, found in kinds.items()}
