"""Who else runs the same job: nobody on one machine, else the launchers of the other nodes.

The supervisor is written for several nodes; `SingleNode` is the null object of one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Protocol

from shardtune.core.host.heartbeat import Heartbeats
from shardtune.core.host.network import LOOPBACK, free_port, interface_of
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
    """One machine. Its ranks find each other through a file in a folder that only its owner may
    enter, another one in each attempt: whoever else is on the machine has nothing to connect to."""

    processes: int
    number: int = 0
    _past: list[Failure] = field(default_factory=list)
    _private: TemporaryDirectory[str] = field(
        default_factory=lambda: TemporaryDirectory(prefix="shardtune-")
    )

    def wait_for_nodes(self, cancelled: Callable[[], bool]) -> Assignment:
        attempt = len(self._past)
        return Assignment(
            ranks=range(self.processes),
            world=self.processes,
            head=LOOPBACK,
            port=free_port(),
            interface=interface_of(LOOPBACK),
            attempt=attempt,
            store_file=f"{self._private.name}/store-{attempt}",
        )

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
        self._private.cleanup()
