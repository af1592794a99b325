"""Kernels compiled for the tile that is fastest on the GPU at hand."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from shardtune.core.heartbeat import compiling

try:
    import triton
except ImportError:  # on a machine without a GPU
    triton = None

TileConfig = tuple[Mapping[str, int], int, int]
"""Sizes of a tile, warps and stages."""


def autotuned(kernel: Any, key: Sequence[str], ways: Sequence[TileConfig]) -> Any:
    """Found when it is first used, and anew where one of the `key` arguments differs. What was
    found is kept on disk: another tile may add up in another order, and a run that is resumed would
    not be the same to the bit."""
    if triton is None:
        return None
    configs = [
        triton.Config(dict(tile), num_warps=warps, num_stages=stages)
        for tile, warps, stages in ways
    ]
    kept = "cache_results" in inspect.signature(triton.autotune).parameters
    told: dict[str, Any] = {"cache_results": True} if kept else {}
    return triton.autotune(configs, key=list(key), do_bench=_timed, **told)(triton.jit(kernel))


def _timed(call: Any, quantiles: Any) -> Any:
    """As Triton does it by itself. A tile is compiled in there, too."""
    with compiling():
        return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles)
