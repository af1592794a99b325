"""Send buckets: the buffers of fixed size in which an engine sends gradients and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SendBuckets:
    """Sizes in elements. The defaults are DeepSpeed's."""

    reduce: float = 5e8
    """Gradients that are reduced at once."""
    buffers: int = 2
    """Buffers of that size which are held ready: two where one is filled while the other is sent,
    none where gradients are sent from where they lie."""
    lasting: bool = False
    """Whether these buffers, and a rank's share of the gradients, are there all the time; else they
    come with a backward pass and go with it."""
    gather: float = 5e8
    """Updated weights that are collected at once, where whole copies of them are held."""
    live: float = 1e9
    """Gathered weights that may be there at a time, where weights are divided."""
    prefetch: float = 5e7
    """Weights that are gathered ahead of their use."""
    persistent: float = 0
    """Weights of at most so many elements stay whole on every rank."""
    most_persistent: float = math.inf
    """Elements that may stay whole altogether."""
    updated: float = math.inf
    """Elements whose gradients are cast to fp32 at a time for the update."""
    overlap: bool = True
    """Whether sending goes on beside computing."""

    def stays_whole(self, size: float) -> bool:
        """Whether a weight of so many elements is never divided."""
        return size <= self.persistent
