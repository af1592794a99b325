"""The key-value store on node 0 through which the launchers of several nodes agree.

hello/N      which life of node N's launcher is there now
left/N       node N is done
attempt      the attempt that all nodes are in
ready/A/N    node N is ready for attempt A, and what has to match on all nodes
running/A    attempt A has begun
own/A/N      how node N failed in attempt A
failed/A     the one cause of it that all agreed on
say/NAME/N   node N's part of an all-gather
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping

from shardtune.launch.node import Node
from shardtune.launch.node_heartbeats import NodeHeartbeats
from shardtune.launch.store_client import LOST_AFTER, StoreClient, connect, serve_store


class NodeStore:
    """The store as one launcher sees it. Node 0 keeps it, on its own address and nowhere else."""

    def __init__(
        self, node: Node, heartbeats: NodeHeartbeats, *, wait: float, say: Callable[[str], None]
    ) -> None:
        self.node, self.heartbeats = node, heartbeats
        self.attempt = 0
        self._wait, self._say = wait, say
        self._me = secrets.token_hex(4)
        self._server = serve_store(node.head, node.port) if node.number == 0 else None
        self._client: StoreClient | None = None

    def open(self) -> bool:
        """Connects and says hello. True if an earlier life of this launcher was in an attempt that
        still runs: that one has to end."""
        if self._client is not None:
            self._client.abandon()
        self.heartbeats.reset()
        node = self.node
        self._client = connect(
            node.head, node.port, node.number, self.heartbeats.payload, self.heartbeats.peers,
            wait=self._wait, say=self._say,
        )  # fmt: skip
        before = self.get(f"hello/{node.number}")
        self.put(f"hello/{node.number}", self._me)
        self._client.remove(f"left/{node.number}")
        self.attempt = int(self.get("attempt") or 0)
        return before not in (None, self._me) and self.get(f"running/{self.attempt}") is not None

    def get(self, key: str) -> str | None:
        """None if nobody has set it, or if node 0 doesn't answer."""
        return self.client.get(key)

    def put(self, key: str, value: str) -> None:
        self.client.put(key, value)

    @property
    def client(self) -> StoreClient:
        assert self._client is not None, "open it first"
        return self._client

    @property
    def is_kept_here(self) -> bool:
        return self._server is not None

    def head_silence(self, now: float) -> float:
        """Seconds since node 0 last answered."""
        return now - self.client.answered

    def head_is_lost(self, now: float) -> bool:
        return not self.is_kept_here and self.head_silence(now) > LOST_AFTER

    def set_ready(self, must_match: Mapping[str, str | int]) -> None:
        """Says that this node is ready for the attempt."""
        key = f"ready/{self.attempt}/{self.node.number}"
        self.put(key, json.dumps([self._me, dict(must_match)]))

    def is_ready(self, number: int) -> bool:
        """Whether the launcher that is there now has said so, not an earlier life of it."""
        told = self.get(f"ready/{self.attempt}/{number}")
        return told is not None and json.loads(told)[0] == self.get(f"hello/{number}")

    def must_match(self, number: int) -> dict[str, str | int]:
        """What a node says that has to match on all of them."""
        told = self.get(f"ready/{self.attempt}/{number}")
        return dict(json.loads(told)[1]) if told else {}

    def has_left(self, number: int) -> bool:
        return self.get(f"left/{number}") is not None

    def leave(self) -> None:
        self.put(f"left/{self.node.number}", self._me)

    def close(self) -> None:
        self.client.close()
        if self._server is not None:
            self._server.close()
