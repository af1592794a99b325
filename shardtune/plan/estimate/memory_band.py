"""The band of a memory forecast: what a job may need at least, and at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardtune.core.units import GIB
from shardtune.plan.estimate.workload import Workload

Verdict = Literal["fits", "tight", "does not fit"]
"""`tight`: what is expected fits, and the upper end of the band doesn't."""


@dataclass(frozen=True)
class Spread:
    """How far measurements were from forecasts: a share of the forecast, and bytes besides."""

    below: float
    above: float
    below_bytes: float
    above_bytes: float


COUNTED = Spread(below=0.03, above=0.03, below_bytes=0.25 * GIB, above_bytes=0.5 * GIB)
"""Our own engines with whole layers, of which each tensor is counted: 3 % is what dry runs of 23
jobs allow, and 20 runs on H200 cards stayed within 1.7 % (docs/benchmarks/planner_gpu.md). CUDA's
own memory was seen to be 0.47 to 0.92 GiB (ml-engineering)."""
PUBLISHED = Spread(below=0.09, above=0.12, below_bytes=0.25 * GIB, above_bytes=1.5 * GIB)
"""Engines of others, and layers in slices or stages. Set by all measurements of memory that
`python -m benchmarks.planner_accuracy` judges, so that the upper end is above 19 of 20; the page
that it writes has the share inside."""


@dataclass(frozen=True)
class MemoryBand:
    """Bytes that must fit on a GPU: between these with a chance of 19 in 20."""

    lower: float
    upper: float


def memory_band(size: float, work: Workload, *, in_parts: bool) -> MemoryBand:
    """The band around a forecast of `size` bytes. `in_parts`: layers are in slices or in stages."""
    known = work.counted and work.buckets is None and not in_parts
    spread = COUNTED if known else PUBLISHED
    low = size * (1 - spread.below) - spread.below_bytes
    return MemoryBand(max(0.0, low), size * (1 + spread.above) + spread.above_bytes)
