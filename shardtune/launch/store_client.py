"""A launcher's line to the head, where all launchers leave notes for each other.

A link that is cut may leave a call waiting for ever. So all calls are made by a thread of the line,
which also shows all the time that this node lives: when it has had no answer for a while, the head
is out of reach, and the line is given up together with its thread.
"""

from __future__ import annotations

import secrets
import socket
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

from shardtune.core.network import listen
from shardtune.errors import LaunchError, Problem

LOST_AFTER = 10.0  # seconds of silence after which the other end is given up
HEARTBEAT_PERIOD = 0.5  # seconds between two signs of life
ANSWER_TIMEOUT = 1.0  # seconds that a question waits for its answer


class StoreClient:
    """An open line. `pulse()` is what this node shows of itself; `others` hear what theirs do."""

    def __init__(
        self,
        head: str,
        port: int,
        me: int,
        heartbeat: Callable[[], str],
        others: dict[int, PeerHeartbeat],
    ) -> None:
        with socket.create_connection((head, port), timeout=2.0):
            pass  # TCPStore would try for minutes, and complain on stderr
        self._store = _store(head, port)
        self._me, self._heartbeat, self._others = me, heartbeat, others
        self._questions: Queue[tuple[Callable[[TCPStore], Any], Future[Any]]] = Queue()
        self._closed = False
        self.answered = time.monotonic()
        """When the head last answered."""
        self.head = self._store.get("head").decode()
        """Which life of the head's launcher this is."""
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def put(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def remove(self, key: str) -> None:
        self._ask(lambda store: store.delete_key(key))

    def get(self, key: str) -> str | None:
        """None if nobody has said it, or if the head doesn't answer."""
        found = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if found is None else str(found.decode())

    def close(self) -> None:
        """Ends the thread, unless it waits for an answer that will not come. An interpreter that
        ends while a thread comes back from C++ would abort."""
        self.abandon()
        self._thread.join(timeout=2 * ANSWER_TIMEOUT)

    def abandon(self) -> None:
        """Leaves a line on which nobody answers to itself."""
        self._closed = True

    def _ask(self, question: Callable[[TCPStore], Any]) -> Any:
        """The head's answer; None if it gives none. Never waits for long."""
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(timeout=ANSWER_TIMEOUT)
        except (OSError, RuntimeError, TimeoutError, FutureTimeout):
            return None

    def _talk(self) -> None:
        """The thread: asks what it is given, and beats."""
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
                other.hear(self._store.get(f"beat/{number}").decode())


class PeerHeartbeat:
    """What was last heard of another node."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self.at: float | None = None
        self._said = ""
        self._take = take

    def hear(self, said: str) -> None:
        if said != self._said:
            known, self._said = bool(self._said), said
            # What a node said before it was lost still lies there: only the next word counts.
            if known or said.startswith("1 "):
                self.at = time.monotonic()
            self._take(said.partition(" ")[2])

    def forget(self) -> None:
        self.at = None


def serve_store(head: str, port: int) -> TCPStore:
    """The place where the notes lie, listening on the head's address only."""
    listener = listen(head, port)
    store = _store(head, port, master_listen_fd=listener.detach(), is_master=True)
    store.set("attempt", "0")
    store.set("head", secrets.token_hex(4))
    return store


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
    """Opens a line, trying for `wait` seconds."""
    deadline = time.monotonic() + wait
    told = False
    while True:
        try:
            return StoreClient(head, port, me, heartbeat, others)
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                fact = f"no launcher of node 0 answers at {head}:{port} ({error})"
                fix = "start node 0, open that port to this node, or correct --head"
                raise LaunchError(Problem("--head", fact, fix)) from None
        if not told:
            told = True
            say(f"waiting for node 0 at {head}:{port}")
        time.sleep(HEARTBEAT_PERIOD)


def _store(head: str, port: int, **settings: Any) -> TCPStore:
    timeout = timedelta(seconds=LOST_AFTER)
    return TCPStore(
        head, port, **{"is_master": False} | settings, wait_for_workers=False, timeout=timeout
    )
