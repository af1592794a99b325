"""A rank's profile: what torch's profiler saw of a few steps, added up."""

from __future__ import annotations

from shardtune.core.record import Record


class Collective(Record):
    """All messages of a kind in the profiled steps."""

    op: str
    """`all_reduce`, `all_gather`, ..."""
    count: int
    seconds: float
    exposed: float
    """Of these, while nothing was computed: what they add to a step."""


class OperationTime(Record):
    """An operation of a processor, or a kernel of a GPU, with all its calls."""

    name: str
    count: int
    seconds: float


class RankProfile(Record):
    """Seconds by what the device did: its kernels where it is a GPU, operations of the thread that
    trains where it is a processor. Their own time, without what they call."""

    rank: int
    steps: int
    seconds: float
    """Of all these steps."""
    on_gpu: bool
    matmul: float
    attention: float
    memory: float
    """Everything else that computes: bound by what memory can read and write."""
    copies: float
    """Between host and device."""
    exposed: float
    """Communication while nothing was computed."""
    idle: float
    """Neither computing nor sending: a GPU for which the host has nothing, a processor that
    interprets Python."""
    operations: int
    """Kernels, or operations, of all steps."""
    collectives: tuple[Collective, ...] = ()
    top: tuple[OperationTime, ...] = ()
    """Those that took longest."""
