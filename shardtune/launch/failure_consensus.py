"""Consensus on a failure: several nodes see different effects, and name one cause together."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from shardtune.errors import Problem
from shardtune.launch.failure import Failure
from shardtune.launch.node_store import NodeStore
from shardtune.launch.store_client import LOST_AFTER

SETTLE_SECONDS = 2.0  # in which the nodes tell how they failed, before one cause is chosen
POLL_PERIOD = 0.1  # seconds between two reads of the store


class FailureConsensus:
    """What each node reports of an attempt, and the cause that all take for it."""

    def __init__(self, store: NodeStore) -> None:
        self._store, self._node = store, store.node

    def past(self) -> list[Failure]:
        """What ended the attempts before this one, the same on every node."""
        attempts = range(self._store.attempt)
        told = [self._store.get(f"failed/{attempt}") for attempt in attempts]
        return [_from_json(text) for text in told if text is not None]

    def report(self, failure: Failure) -> None:
        """Says how this node failed."""
        key = f"own/{self._store.attempt}/{self._node.number}"
        self._store.put(key, _to_json(failure))

    def reported(self) -> list[Failure]:
        """What the other nodes have reported of this attempt so far."""
        keys = [f"own/{self._store.attempt}/{number}" for number in self._node.others]
        return [_from_json(text) for key in keys if (text := self._store.get(key)) is not None]

    def agree(self, own: Failure | None) -> Failure:
        """One cause for all nodes, of those that they report within a moment."""
        begun = time.monotonic()
        if own is not None:
            self.report(own)
        while True:
            agreed = self._store.get(f"failed/{self._store.attempt}")
            if agreed is not None:
                return _from_json(agreed)
            now = time.monotonic()
            if self._store.is_kept_here and now - begun > SETTLE_SECONDS:
                self._choose()
            elif not self._store.is_kept_here and now - begun > LOST_AFTER:
                return own or self.lost_node(0, self._store.head_silence(now), 0)
            time.sleep(POLL_PERIOD)

    def lost_node(self, number: int, silent: float, step: int) -> Failure:
        """The failure of a node that gives no more heartbeats."""
        name = f"node {number}" + (f" ({self._node.head})" if number == 0 else "")
        fact = f"no heartbeat for {silent:.0f} s: the link to it is down, or the machine is"
        fix = "check that node; `shardtune doctor` tests the link"
        return Failure("fault", None, step, (Problem(name, fact, fix),))

    def _choose(self) -> None:
        attempt = self._store.attempt
        keys = [f"own/{attempt}/{number}" for number in range(self._node.count)]
        told = [text for key in keys if (text := self._store.get(key)) is not None]
        cause = min(map(_from_json, told), key=_hearsay)
        self._store.put(f"failed/{attempt}", _to_json(cause))


def _hearsay(failure: Failure) -> tuple[int, int]:
    """How likely it is that a failure only echoes another one."""
    text = failure.problems[0].fact.lower()
    echo = any(word in text for word in ("by peer", "connection", "gloo", "nccl"))
    return (2 if echo else 0 if failure.rank is not None else 1), -failure.step


def _to_json(failure: Failure) -> str:
    return json.dumps(asdict(failure))


def _from_json(text: str) -> Failure:
    found = json.loads(text)
    return Failure(**found | {"problems": tuple(Problem(**each) for each in found["problems"])})
