"""The ranks of a run as a grid with named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardtune.errors import JobError, Problem

WORLD = "world"
"""The name of all axes together in a rule."""
ORDER = ("pipeline", "replicate", "data", "shard", "expert", "tensor")
"""Outermost first. Inner axes communicate most: tensor and expert parallelism inside a node,
stages between nodes."""
FREE_AXES = frozenset({"data", "shard"})
"""Axes that get the ranks that the other axes leave."""
MODEL_AXES = frozenset({"pipeline", "tensor"})
"""Ranks along these axes hold parts of one model and have the same rows; all others are data axes,
along which each rank has rows of its own."""


@dataclass(frozen=True)
class Mesh:
    """Axis names and sizes, outermost first: `(("data", 4),)` is data parallelism on 4 ranks."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def around(cls, fixed: Mapping[str, int], free: str, ranks: int) -> Mesh:
        """The mesh with these axes, of which `free` takes up the ranks that the others leave.

        Where they don't divide the ranks it is the mesh of the nearest number that they do;
        `require` then says so.
        """
        taken = math.prod(fixed.values())
        sizes = {**fixed, free: max(1, (2 * ranks + taken) // (2 * taken))}  # rounded
        axes = [(axis, sizes[axis]) for axis in ORDER if axis in sizes]
        return cls(tuple((axis, size) for axis, size in axes if size > 1 or axis == free))

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def data_ranks(self) -> int:
        """Data-parallel degree: over how many ranks the rows of a step are split."""
        return math.prod(size for axis, size in self.axes if axis not in MODEL_AXES)

    def size_of(self, axis: str) -> int:
        """The size of an axis; one that isn't there has size one. WORLD is all of them together."""
        return self.size if axis == WORLD else dict(self.axes).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on each axis. The innermost axis varies fastest."""
        found = {}
        for axis, size in reversed(self.axes):
            rank, found[axis] = divmod(rank, size)
        return found

    def data_rank(self, rank: int) -> int:
        """Which part of the rows a rank computes."""
        place, share = self.coordinates(rank), 0
        for axis, size in self.axes:
            if axis not in MODEL_AXES:
                share = share * size + place[axis]
        return share

    def require(self, ranks: int) -> None:
        """JobError if the axes don't multiply to the world size."""
        if self.size != ranks:
            raise JobError(
                Problem(
                    "strategy",
                    f"{self} = {self.size} != {ranks} ranks",
                    f"start {self._startable(ranks)} processes, or, on {ranks}, use "
                    f"{self._nearest(ranks)}",
                )
            )

    def _startable(self, ranks: int) -> str:
        """The numbers of ranks on either side that leave every axis but the last of rows alone."""
        free = [size for axis, size in self.axes if axis in FREE_AXES][-1:]
        fixed = self.size // math.prod(free)
        below = ranks // fixed * fixed
        if below in (0, ranks):
            return str(self.size)
        return f"{below} or {below + fixed}"

    def _nearest(self, ranks: int) -> Mesh:
        """The mesh of exactly these ranks that changes the fewest model axes, and by the least.

        Among equals the one that splits layers least: not every number divides the heads.
        """

        def far(sizes: tuple[int, ...]) -> tuple[int, float, int]:
            pairs = [(new, *axis) for new, axis in zip(sizes, self.axes, strict=True)]
            changed = sum(new != old for new, axis, old in pairs if axis in MODEL_AXES)
            return changed, sum(abs(math.log(new / old)) for new, _, old in pairs), sizes[-1]

        best = min(_factorings(ranks, len(self.axes)), key=far)
        names = (axis for axis, _ in self.axes)
        return Mesh(tuple(zip(names, best, strict=True)))

    def __str__(self) -> str:
        return " x ".join(f"{name}({size})" for name, size in self.axes)


def _factorings(number: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to write a number as a product of so many factors, in order."""
    if parts <= 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in _factorings(number // first, parts - 1)
    ]
