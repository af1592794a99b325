"""Stop requests: how a person, or a cluster, asks a run to end early."""

from __future__ import annotations

from enum import IntEnum


class StopRequest(IntEnum):
    """What a run is asked to do; the stronger request is the larger number."""

    NONE = 0
    STOP = 1
    """After this step: checkpoint, result and summary."""
    PREEMPT = 2
    """Preemption: a checkpoint after this step and nothing else, the machine is taken away."""
