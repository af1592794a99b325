"""World: the rank of this process, the world size, and its device."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from shardtune.core.host.heartbeat import Heartbeat


@dataclass(frozen=True)
class World:
    """Facts about one rank; `size` is the world size, `device` as torch calls it: `cuda:0`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: str = "cpu"
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False, repr=False)
    """Where an engine says what it is doing."""
    nodes: int = 1
    """Machines that the ranks are on."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and speaks to the person."""
        return self.rank == 0


def outside_ranks() -> int | None:
    """How many ranks run already if this process is one of them, else None."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size and "RANK" in os.environ else None


def outside_nodes() -> int:
    """On how many machines those ranks are; one where nobody says."""
    size = outside_ranks() or 1
    return max(1, size // int(os.environ.get("LOCAL_WORLD_SIZE", size)))
