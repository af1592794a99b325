"""Autotuned Triton kernels: compiled for the tile sizes that are fastest on the GPU at hand."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from shardtune.core.host.heartbeat import compiling
from shardtune.kernels.triton_import import jit, triton

TileConfig = tuple[Mapping[str, int], int, int]
"""Tile sizes, num_warps and num_stages of a `triton.Config`."""


def autotuned(kernel: Any, key: Sequence[str], configurations: Sequence[TileConfig]) -> Any:
    """`triton.autotune`: decided at first use, and anew where one of the `key` arguments differs.
    The choice is cached on disk: another tile may sum in another order, and a resumed run would not
    be the same to the bit."""
    if triton is None:
        return None
    configs = [
        triton.Config(dict(tile), num_warps=warps, num_stages=stages)
        for tile, warps, stages in configurations
    ]
    kept = "cache_results" in inspect.signature(triton.autotune).parameters
    told: dict[str, Any] = {"cache_results": True} if kept else {}
    return triton.autotune(configs, key=list(key), do_bench=_timed, **told)(jit(kernel))


def _timed(call: Any, quantiles: Any) -> Any:
    """As Triton does it by itself. A tile is compiled in there, too."""
    with compiling():
        return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles)
