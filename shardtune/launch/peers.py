"""Who else runs the same job: nobody on one machine, else the launchers of the other nodes.

The supervisor is written for several nodes; `SingleNode` is the null object of one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardtune.core.heartbeat import Heartbeats
from shardtune.core.network import LOOPBACK, interface_of, listen
from shardtune.launch.failure import Failure
from shardtune.launch.workers import Assignment


class Launchers(Protocol):
    """The launchers of a run, as one of them sees them."""

    @property
    def number(self) -> int:
        """Of this node."""
        ...

    def wait_for_nodes(self, cancelled: Callable[[], bool]) -> Assignment | None:
        """Returns when every node is ready for an attempt; None if `cancelled` says so before."""
        ...

    def past_failures(self) -> list[Failure]:
        """What ended the attempts before this one, the same on every node."""
        ...

    def publish_heartbeats(self, heartbeats: Heartbeats | None) -> None:
        """From now on the others see the heartbeats of this node's ranks, and it sees theirs."""
        ...

    def remote_ranks(self) -> dict[int, int]:
        """The ranks of other nodes, each with a process id that nobody has."""
        ...

    def any_node_silent(self) -> bool:
        """Whether some node is silent, so that what hangs here may only be waiting for it."""
        ...

    def remote_failure(self, step: int) -> Failure | None:
        """What another node has reported, or that it is lost."""
        ...

    def agree_on_cause(self, own: Failure) -> Failure:
        """One cause for all nodes."""
        ...

    def next_attempt(self, cancelled: Callable[[], bool]) -> bool:
        """Goes on to another attempt; False if `cancelled` says so before."""
        ...

    def close(self) -> None:
        """Says that this node is done."""
        ...


@dataclass
class SingleNode:
    """One machine. The store of its ranks is new for each attempt, on the loopback address only."""

    processes: int
    number: int = 0
    _past: list[Failure] = field(default_factory=list)
    _store: TCPStore | None = None

    def wait_for_nodes(self, cancelled: Callable[[], bool]) -> Assignment:
        listener = listen(LOOPBACK, 0)  # a port that the kernel chose can't be in use
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        ranks, interface = range(self.processes), interface_of(LOOPBACK)
        return Assignment(ranks, self.processes, LOOPBACK, port, interface, len(self._past))

    def past_failures(self) -> list[Failure]:
        return list(self._past)

    def publish_heartbeats(self, heartbeats: Heartbeats | None) -> None:
        pass

    def remote_ranks(self) -> dict[int, int]:
        return {}

    def any_node_silent(self) -> bool:
        return False

    def remote_failure(self, step: int) -> Failure | None:
        return None

    def agree_on_cause(self, own: Failure) -> Failure:
        self._past.append(own)
        return own

    def next_attempt(self, cancelled: Callable[[], bool]) -> bool:
        return True

    def close(self) -> None:
        self._store = None
