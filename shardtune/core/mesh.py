"""The ranks of a run as a grid with named axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardtune.errors import JobError, Problem

WORLD = "world"
"""The name under which a rule speaks of all axes at once."""


@dataclass(frozen=True)
class Mesh:
    """Axis names and sizes, outermost first: `(("data", 4),)` is four ranks side by side."""

    axes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size_of(self, axis: str) -> int:
        """The size of an axis; one that isn't there has size one. WORLD is all of them together."""
        return self.size if axis == WORLD else dict(self.axes).get(axis, 1)

    def require(self, ranks: int) -> None:
        """Refuses a mesh that doesn't multiply out to the ranks at hand."""
        if self.size != ranks:
            equation = " x ".join(f"{name}({size})" for name, size in self.axes)
            raise JobError(
                Problem(
                    "strategy",
                    f"{equation} = {self.size} != {ranks} ranks",
                    f"start {self.size} processes, or change an axis",
                )
            )
