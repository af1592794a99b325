"""The memory that CUDA graphs of one kind share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch


class GraphPool:
    """Records graphs that never run at the same time into one pool. torch gives up a pool with its
    last graph, and refuses to record another one into it: then there is a new one."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Around what `graph` is to record."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        # Another thread may use the GPU meanwhile, which is no part of it.
        with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            yield
        self._graphs.add(graph)
