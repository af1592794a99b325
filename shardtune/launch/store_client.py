"""A launcher's client of the TCPStore on node 0, and the heartbeats of nodes that go through it.

A link that is cut may leave a call waiting for ever. So all calls are made by a thread of the
client, which also sends this node's heartbeat: when it has had no answer for a while, node 0 is out
of reach, and the client is given up together with its thread.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # its own before Python 3.11
from contextlib import suppress
from datetime import timedelta
from queue import Empty, Queue
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardtune.errors import LaunchError, LaunchRefused, Problem
from shardtune.launch import SECRET
from shardtune.launch.gate import Gate, knock

LOST_AFTER = 10.0  # seconds of silence after which the other end is given up
STORE_TIMEOUT = timedelta(seconds=LOST_AFTER)
HEARTBEAT_PERIOD = 0.5  # seconds between two signs of life
ANSWER_TIMEOUT = 1.0  # seconds that a question waits for its answer


class StoreClient:
    """A connection to the store. `heartbeat()` is what this node shows of its ranks; `others` get
    those of the other nodes."""

    def __init__(
        self,
        head: str,
        port: int,
        me: int,
        heartbeat: Callable[[], str],
        others: dict[int, PeerHeartbeat],
    ) -> None:
        self.port = knock(head, port, timeout=2.0)  # TCPStore would try for minutes
        """Where the store itself is."""
        self._store = TCPStore(
            head, self.port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
        )
        self._me, self._heartbeat, self._others = me, heartbeat, others
        self._questions: Queue[tuple[Callable[[TCPStore], Any], Future[Any]]] = Queue()
        self._closed = False
        self.answered = time.monotonic()
        """When node 0 last answered."""
        self.head = self._store.get("head").decode()
        """Which life of node 0's launcher this is."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def remove(self, key: str) -> None:
        self._ask(lambda store: store.delete_key(key))

    def get(self, key: str) -> str | None:
        """None if nobody has set it, or if node 0 doesn't answer."""
        found = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if found is None else str(found.decode())

    def close(self) -> None:
        """Ends the thread, unless it waits for an answer that will not come. An interpreter that
        ends while a thread comes back from C++ would abort."""
        self.abandon()
        self._thread.join(timeout=2 * ANSWER_TIMEOUT)

    def abandon(self) -> None:
        """Leaves a connection on which nobody answers to itself."""
        self._closed = True

    def _ask(self, question: Callable[[TCPStore], Any]) -> Any:
        """The store's answer; None if it gives none. Never waits for long."""
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(timeout=ANSWER_TIMEOUT)
        except (OSError, RuntimeError, TimeoutError, FutureTimeout):
            return None

    def _run(self) -> None:
        """The thread: asks what it is given, and sends heartbeats."""
        beats, next_beat = 0, time.monotonic()
        while not self._closed:
            try:
                wait = max(0.0, next_beat - time.monotonic())
                question, answer = self._questions.get(timeout=wait)
            except Empty:
                beats, next_beat = beats + 1, time.monotonic() + HEARTBEAT_PERIOD
                with suppress(OSError, RuntimeError):  # whoever looks at us will notice
                    self._beat(beats)
                    self.answered = time.monotonic()
                continue
            try:
                answer.set_result(question(self._store))
            except (OSError, RuntimeError) as error:
                answer.set_exception(error)

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self._me}", f"{count} {self._heartbeat()}")
        for number, other in self._others.items():
            if self._store.check([f"beat/{number}"]):
                other.observe(self._store.get(f"beat/{number}").decode())


class PeerHeartbeat:
    """The heartbeat of another node: when it was last seen to change."""

    def __init__(self, on_payload: Callable[[str], None]) -> None:
        self.at: float | None = None
        self._last = ""
        self._on_payload = on_payload

    def observe(self, beat: str) -> None:
        """Takes what lies in the store: a count, and the heartbeats of the node's ranks."""
        if beat != self._last:
            known, self._last = bool(self._last), beat
            # What a node wrote before it was lost still lies there: only the next beat counts.
            if known or beat.startswith("1 "):
                self.at = time.monotonic()
            self._on_payload(beat.partition(" ")[2])

    def silence(self, now: float) -> float:
        """Seconds since the last beat; for ever if there was none."""
        return float("inf") if self.at is None else now - self.at

    def reset(self) -> None:
        """Forgets when it was last seen."""
        self.at = None


def serve_store(head: str, port: int) -> Gate:
    """The store itself, behind its gate, listening on node 0's address only."""
    gate = Gate(head, port, "--head", STORE_TIMEOUT)
    gate.store.set("attempt", "0")
    gate.store.set("head", secrets.token_hex(4))
    return gate


def connect(
    head: str,
    port: int,
    me: int,
    heartbeat: Callable[[], str],
    others: dict[int, PeerHeartbeat],
    *,
    wait: float,
    say: Callable[[str], None],
) -> StoreClient:
    """Connects to the store, trying for `wait` seconds."""
    deadline = time.monotonic() + wait
    told = False
    while True:
        try:
            return StoreClient(head, port, me, heartbeat, others)
        except (OSError, RuntimeError) as error:
            stranger = isinstance(error, PermissionError)  # node 0 may still come in its place
            if time.monotonic() > deadline:
                raise _unanswered(head, port, error) from None
        if not told:
            told = True
            doubt = f": who answers there has another {SECRET}" if stranger else ""
            say(f"waiting for node 0 at {head}:{port}{doubt}")
        time.sleep(HEARTBEAT_PERIOD)


def _unanswered(head: str, port: int, error: Exception) -> LaunchError:
    if isinstance(error, PermissionError):
        fix = f"set {SECRET} to the same value on all nodes, or on none"
        return LaunchRefused(Problem("--head", f"{head}:{port}: {error}", fix))
    fact = f"no launcher of node 0 answers at {head}:{port} ({error})"
    fix = "start node 0, open that port to this node, or correct --head"
    return LaunchError(Problem("--head", fact, fix))
