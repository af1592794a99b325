"""Heartbeats between nodes: each launcher shows those of its ranks, and takes over the others'.

So the watchdog of every node sees all ranks of the run, and a node that is silent is noticed.
"""

from __future__ import annotations

import base64
from functools import partial

from shardtune.core.host.heartbeat import Heartbeats
from shardtune.launch.node import Node
from shardtune.launch.store_client import LOST_AFTER, PeerHeartbeat


class NodeHeartbeats:
    """The heartbeats of all nodes, as this one sees them."""

    def __init__(self, node: Node, processes: int) -> None:
        self.node, self.processes = node, processes
        self.peers = {n: PeerHeartbeat(partial(self._take_over, n)) for n in node.others}
        self._of_ranks: Heartbeats | None = None

    @property
    def ranks(self) -> range:
        """Those of this node."""
        first = self.node.number * self.processes
        return range(first, first + self.processes)

    def publish(self, heartbeats: Heartbeats | None) -> None:
        """From now on these are shown to the other nodes, and theirs are written into them."""
        self._of_ranks = heartbeats

    def payload(self) -> str:
        """What this node shows of its ranks, as text."""
        shown = self._of_ranks
        return "" if shown is None else base64.b64encode(shown.slots(self.ranks)).decode()

    def reset(self) -> None:
        """Forgets when the others were last heard of."""
        for peer in self.peers.values():
            peer.reset()

    def is_alive(self, number: int, now: float) -> bool:
        """Whether a node was heard of lately; this one is alive."""
        return number == self.node.number or self.peers[number].silence(now) <= LOST_AFTER

    def lost(self, now: float) -> dict[int, float]:
        """Nodes that were heard of and are silent for too long, with the seconds."""
        silences = {n: peer.silence(now) for n, peer in self.peers.items() if peer.at is not None}
        return {number: seconds for number, seconds in silences.items() if seconds > LOST_AFTER}

    def longest_silence(self, now: float) -> float:
        """Of the nodes that were heard of, in seconds."""
        known = [peer.silence(now) for peer in self.peers.values() if peer.at is not None]
        return max(known, default=0.0)

    def _take_over(self, number: int, payload: str) -> None:
        shown = self._of_ranks
        if payload and shown is not None:
            shown.put(number * self.processes, base64.b64decode(payload))
