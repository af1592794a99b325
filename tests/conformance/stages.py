"""Which weights a rank's stages have, and over how many borders it sends, from names and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardtune.core.layout import Layout
from shardtune.core.mesh import Mesh
from shardtune.core.model.parallel_plan import SHARDABLE_FAMILIES
from shardtune.core.pipeline_schedule import split_layers, stage_costs

FAMILY = SHARDABLE_FAMILIES["llama"]
FP32 = 4
ACTIVE = 0.5
"""The share of its experts that a token meets in `MIXTURES`."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Place:
    """What one rank has of a model. Without stages that is everything."""

    names: frozenset[str]
    starts: bool = True
    ends: bool = True
    borders: int = 0
    tied: int = 0
    """Bytes of gradients that the first and the last stage both have."""


def place_of(
    shapes: Shapes, trained: Collection[str], layout: Layout, mesh: Mesh, rank: int
) -> Place:
    """Where a rank stands in the pipeline."""
    if layout.pipelining is None:
        return Place(frozenset(shapes))
    ranks, here = mesh.size_of("pipeline"), mesh.coordinates(rank)["pipeline"]
    owners = layout.pipelining.ranks(ranks)
    stages = zip(owners, split_layers(_costs(shapes), len(owners)), strict=True)
    layers = {layer for owner, stage in stages if owner == here for layer in stage}
    starts, ends = owners[0] == here, owners[-1] == here
    tied = [name for name in shapes if _is_end(name, FAMILY.embedding)] if _tied(shapes) else []

    def mine(name: str) -> bool:
        layer = _layer(name)
        if layer is not None:
            return layer in layers
        if _is_end(name, FAMILY.embedding):
            return starts or (ends and name in tied)
        return ends

    apart = owners[0] != owners[-1] and (starts or ends)
    both = [name for name in tied if name in trained] if apart else []
    return Place(
        frozenset(filter(mine, shapes)),
        starts,
        ends,
        layout.pipelining.borders(ranks, here),
        FP32 * sum(math.prod(shapes[name]) for name in both),
    )


def _costs(shapes: Shapes) -> list[float]:
    """Of the layers, each the size of its matrices, and of the head behind the last."""
    matrices = {
        name: math.prod(shape) * (ACTIVE if len(shape) == 3 else 1)
        for name, shape in shapes.items()
        if len(shape) > 1 and "lora_" not in name and ".gate." not in name
    }
    count = 1 + max(_layer(name) or 0 for name in shapes)
    layers = [
        sum(size for name, size in matrices.items() if _layer(name) == n) for n in range(count)
    ]
    end = FAMILY.embedding if _tied(shapes) else FAMILY.head
    return stage_costs(layers, sum(s for name, s in matrices.items() if _is_end(name, end)))


def _tied(shapes: Shapes) -> bool:
    """A weight that is shared bears one name only."""
    return not any(_is_end(name, FAMILY.head) for name in shapes)


def _is_end(name: str, end: str) -> bool:
    return f".{end}." in f".{name}"


def _layer(name: str) -> int | None:
    found = re.search(rf"\.{FAMILY.layers}\.(\d+)\.", name)
    return int(found[1]) if found else None
