"""How a person, or a cluster, wants a run to end before its end."""

from __future__ import annotations

from enum import IntEnum


class Wish(IntEnum):
    """The stronger wish is the larger number."""

    NONE = 0
    STOP = 1
    """After this step: checkpoint, result and summary."""
    LEAVE = 2
    """After this step: a checkpoint and nothing else, the machine is about to be taken away."""
