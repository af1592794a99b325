"""The launchers of several nodes: they meet at the head, start their ranks together, and end them
together.

Node 0 keeps the notes through which they agree, at the address that every node was given and
nowhere else. Each launcher puts its heartbeat there twice a second, with those of its ranks, so
that a hung rank is blamed on the right node. A node that is silent for `LOST_AFTER` seconds is
given up:
every launcher then stops its ranks and says why. It may come back (the same command again): the
others wait for it, and all go on from the last checkpoint.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardtune.core.heartbeat import Heartbeats
from shardtune.core.network import LOOPBACK, address_of, interface_of, interfaces, own_address
from shardtune.errors import JobError, LaunchError, Problem
from shardtune.launch.failure import Failure
from shardtune.launch.store_client import (
    LOST_AFTER,
    PeerHeartbeat,
    StoreClient,
    connect,
    serve_store,
)
from shardtune.launch.workers import Assignment

SETTLE_SECONDS = 2.0  # seconds in which the nodes tell how they failed, before one cause is chosen
SUSPECT_AFTER = 3.0  # seconds of silence after which a node is suspected
POLL_PERIOD = 0.1  # seconds between two looks at the notes
_MARK = ".shardtune-nodes"


@dataclass(frozen=True)
class Node:
    """Which of how many machines this is, and where they meet."""

    count: int
    number: int
    head: str
    """The IPv4 address of node 0."""
    port: int
    interface: str = ""
    """What this node talks to the others over."""

    @staticmethod
    def parse(count: int, number: int, head: str, interface: str | None = None) -> Node:
        """From the command line; JobError says everything that is wrong."""
        host, _, port = head.rpartition(":")
        problems = []
        if not 0 <= number < count:
            fact = f"there is no node {number} among {count}"
            problems.append(Problem("--node-rank", fact, "number the nodes from 0"))
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            fix = "write the address of node 0 and a free port of it, as 10.0.0.1:29400"
            problems.append(Problem("--head", f"{head!r} is not HOST:PORT", fix))
        if interface is not None and interface not in {name for name, _ in interfaces()}:
            known = ", ".join(sorted({name for name, _ in interfaces()}))
            fact = f"there is no interface {interface!r} with an address"
            problems.append(Problem("--interface", fact, f"this node has {known}"))
        if problems:
            raise JobError(problems)
        address = address_of(host)
        if address == LOOPBACK and count > 1:
            fact = f"{host} is this node itself" if number else f"no other node reaches {host}"
            raise JobError(Problem("--head", fact, "name node 0 by an address that others reach"))
        own = address if number == 0 else own_address(address)
        return Node(count, number, address, int(port), interface or interface_of(own))


class MultiNode:
    """This node's place among the launchers. `wait` seconds a node may be missing, at the start or
    after it was lost, before the others give up."""

    def __init__(
        self, node: Node, processes: int, *, wait: float, say: Callable[[str], None]
    ) -> None:
        self.node, self.processes, self.wait, self._say = node, processes, wait, say
        self.number = node.number
        self.must_match: Mapping[str, Any] = {}
        """What has to be equal on all nodes; set it before they gather."""
        self.attempt = 0
        self._me = secrets.token_hex(4)
        self._heartbeats: Heartbeats | None = None
        self._shared: Path | None = None
        numbers = [number for number in range(node.count) if number != node.number]
        self._others = {number: PeerHeartbeat(partial(self._take, number)) for number in numbers}
        self._notes = serve_store(node.head, node.port) if node.number == 0 else None
        self._line = self._dial()

    @property
    def ranks(self) -> range:
        """Those of this node."""
        first = self.node.number * self.processes
        return range(first, first + self.processes)

    @property
    def world(self) -> int:
        """The ranks of all nodes."""
        return self.node.count * self.processes

    # Before an attempt ----------------------------------------------------------------------------

    def wait_for_nodes(self, cancelled: Callable[[], bool]) -> Assignment | None:
        """Returns when every node is ready for this attempt; None if `cancelled` says so meanwhile.

        A node may take its time (it may be tokenising) as long as it shows that it lives.
        """
        here_since = told = time.monotonic()
        self._say_ready()
        while missing := [number for number in self._others if not self._ready(number)]:
            if cancelled():
                return None
            if refused := self._refused():
                raise LaunchError(refused)
            now = time.monotonic()
            if self._head_is_lost(now):
                self._redial()
                self._say_ready()
            silent = [number for number in missing if not self._alive(number, now)]
            here_since = here_since if silent else now
            if now - here_since > self.wait:
                raise LaunchError(self._absent(silent))
            if now - told > 30.0:
                told = now
                doing = "not heard of yet" if silent else "getting ready"
                self._say(f"waiting for node {', '.join(map(str, missing))}: {doing}")
            time.sleep(POLL_PERIOD)
        self._refuse_differences()
        self._line.put(f"running/{self.attempt}", "yes")
        node = self.node
        return Assignment(
            self.ranks, self.world, node.head, node.port, node.interface, self.attempt
        )

    def next_attempt(self, cancelled: Callable[[], bool]) -> bool:
        """Goes on to another attempt; False if `cancelled` says so before the head answers."""
        for other in self._others.values():
            other.forget()
        if self.node.number == 0:
            self.attempt += 1
            self._line.put("attempt", str(self.attempt))
            return True
        before, head = self.attempt, self._line.head
        while not cancelled():
            if self._head_is_lost(time.monotonic()):
                self._redial()
            current = self._line.get("attempt")
            if current is not None and (int(current) > before or self._line.head != head):
                self.attempt = int(current)
                return True
            time.sleep(POLL_PERIOD)
        return False

    def past_failures(self) -> list[Failure]:
        """What ended the attempts before this one, the same on every node."""
        told = [self._line.get(f"failed/{attempt}") for attempt in range(self.attempt)]
        return [_from_json(text) for text in told if text is not None]

    def all_gather(self, name: str, mine: str) -> list[str]:
        """What each node says under a name, by its number; LaunchError if one is lost."""
        self._line.put(f"say/{name}/{self.number}", mine)
        waiting_since = time.monotonic()
        while True:
            told = [self._line.get(f"say/{name}/{number}") for number in range(self.node.count)]
            if (said := [each for each in told if each is not None]) and len(said) == len(told):
                return said
            now = time.monotonic()
            silent = [n for n, each in enumerate(told) if each is None and not self._here(n, now)]
            waiting_since = waiting_since if silent else now
            if self._head_is_lost(now):
                raise LaunchError(self._lost(0, now - self._line.answered, 0).problems)
            if now - waiting_since > self.wait:
                raise LaunchError(self._absent(silent))
            time.sleep(POLL_PERIOD)

    def announce_refusal(self, problems: tuple[Problem, ...]) -> None:
        """Says that this node can't take part, and why; the others stop waiting for it."""
        place = f"node {self.number}"
        told = tuple(Problem(f"{place}: {each.place}", each.fact, each.fix) for each in problems)
        failure = Failure("problem", None, 0, told)
        self._line.put(f"own/{self.attempt}/{self.number}", _to_json(failure))

    def require_shared_folder(self, folder: Path) -> None:
        """A folder that has to be the same one on all nodes: they look when they gather."""
        self._shared = folder

    # During an attempt ----------------------------------------------------------------------------

    def publish_heartbeats(self, heartbeats: Heartbeats | None) -> None:
        """From now on the others see the pulses of this node's ranks, and theirs are seen here."""
        self._heartbeats = heartbeats

    def remote_ranks(self) -> dict[int, int]:
        """The ranks of other nodes, each with a process id that nobody has."""
        return {rank: 0 for rank in range(self.world) if rank not in self.ranks}

    def any_node_silent(self) -> bool:
        """Whether some node is silent, so that what hangs here may only be waiting for it."""
        now = time.monotonic()
        silent = [now - other.at for other in self._others.values() if other.at is not None]
        return max([now - self._line.answered, *silent]) > SUSPECT_AFTER

    def remote_failure(self, step: int) -> Failure | None:
        """What another node has reported, or that it is lost."""
        now = time.monotonic()
        if self._head_is_lost(now):
            return self._lost(0, now - self._line.answered, step)
        for number, other in self._others.items():
            if other.at is not None and now - other.at > LOST_AFTER and not self._left(number):
                return self.agree_on_cause(self._lost(number, now - other.at, step))
        told = (self._line.get(f"own/{self.attempt}/{number}") for number in self._others)
        return self.agree_on_cause(None) if any(told) else None

    def agree_on_cause(self, own: Failure | None) -> Failure:
        """One cause for all nodes, of those that they report within a moment."""
        number, begun = self.node.number, time.monotonic()
        if own is not None:
            self._line.put(f"own/{self.attempt}/{number}", _to_json(own))
        while True:
            if (agreed := self._line.get(f"failed/{self.attempt}")) is not None:
                return _from_json(agreed)
            now = time.monotonic()
            if number == 0 and now - begun > SETTLE_SECONDS:
                keys = [f"own/{self.attempt}/{each}" for each in range(self.node.count)]
                told = [text for key in keys if (text := self._line.get(key)) is not None]
                cause = min(map(_from_json, told), key=_hearsay)
                self._line.put(f"failed/{self.attempt}", _to_json(cause))
            elif number != 0 and now - begun > LOST_AFTER:
                return own or self._lost(0, now - self._line.answered, 0)
            time.sleep(POLL_PERIOD)

    def close(self) -> None:
        """Takes leave of the others. The head stays until they have done so too."""
        self._heartbeats = None
        self._line.put(f"left/{self.node.number}", self._me)
        deadline = time.monotonic() + LOST_AFTER / 2
        while self._notes is not None and time.monotonic() < deadline:
            now = time.monotonic()
            if all(self._left(n) or not self._alive(n, now) for n in self._others):
                break
            time.sleep(POLL_PERIOD)
        if self._shared is not None and self.number == 0:
            (self._shared / _MARK).unlink(missing_ok=True)
        self._line.close()

    # Notes ----------------------------------------------------------------------------------------

    def _redial(self) -> None:
        self._line.abandon()
        self._line = self._dial()

    def _dial(self) -> StoreClient:
        """Opens a line and says who is here. A launcher that comes again ends the attempt that it
        was part of in its earlier life."""
        for other in self._others.values():
            other.forget()
        node = self.node
        line = connect(
            node.head, node.port, node.number, self._show, self._others,
            wait=self.wait, say=self._say,
        )  # fmt: skip
        self._line = line
        before = line.get(f"hello/{node.number}")
        line.put(f"hello/{node.number}", self._me)
        line.remove(f"left/{node.number}")
        self.attempt = int(line.get("attempt") or 0)
        if before not in (None, self._me) and line.get(f"running/{self.attempt}"):
            fact = "its launcher was started again"
            fix = "nothing: all nodes go on from the last checkpoint"
            self.agree_on_cause(
                Failure("fault", None, 0, (Problem(f"node {node.number}", fact, fix),))
            )
            self.next_attempt(lambda: False)
        return self._line

    def _refused(self) -> list[Problem]:
        """Why another node can't take part."""
        keys = [f"own/{self.attempt}/{number}" for number in self._others]
        told = [_from_json(text) for key in keys if (text := self._line.get(key)) is not None]
        return [each for one in told if one.kind == "problem" for each in one.problems]

    def _say_ready(self) -> None:
        if self._shared is not None and self.number == 0:
            (self._shared / _MARK).write_text(self._line.head, encoding="utf-8")
        key = f"ready/{self.attempt}/{self.node.number}"
        self._line.put(key, json.dumps([self._me, dict(self.must_match)]))

    def _ready(self, number: int) -> bool:
        """Whether the launcher that is there now has said so, not an earlier life of it."""
        told = self._line.get(f"ready/{self.attempt}/{number}")
        return told is not None and json.loads(told)[0] == self._line.get(f"hello/{number}")

    def _show(self) -> str:
        heartbeats = self._heartbeats
        return "" if heartbeats is None else base64.b64encode(heartbeats.slots(self.ranks)).decode()

    def _take(self, number: int, slots: str) -> None:
        heartbeats = self._heartbeats
        if slots and heartbeats is not None:
            heartbeats.put(number * self.processes, base64.b64decode(slots))

    def _left(self, number: int) -> bool:
        return self._line.get(f"left/{number}") is not None

    def _here(self, number: int, now: float) -> bool:
        return number == self.number or self._alive(number, now)

    def _alive(self, number: int, now: float) -> bool:
        heard = self._others[number].at
        return heard is not None and now - heard <= LOST_AFTER

    def _head_is_lost(self, now: float) -> bool:
        return self.node.number != 0 and now - self._line.answered > LOST_AFTER

    def _lost(self, number: int, silent: float, step: int) -> Failure:
        name = f"node {number}" + (f" ({self.node.head})" if number == 0 else "")
        fact = f"not heard from for {silent:.0f} s: the link to it is down, or the machine is"
        fix = "look after that node; `shardtune doctor` tests the link"
        return Failure("fault", None, step, (Problem(name, fact, fix),))

    def _absent(self, silent: list[int]) -> list[Problem]:
        fact = f"did not come within {self.wait:g} s (launch.rejoin)"
        fix = "start the same command there with its own --node-rank, and open the head's port"
        return [Problem(f"node {number}", fact, fix) for number in silent]

    def _refuse_differences(self) -> None:
        """Nodes that would not compute the same must not begin."""
        told = [self._line.get(f"ready/{self.attempt}/{n}") for n in range(self.node.count)]
        first, *others = (json.loads(text)[1] if text else {} for text in told)
        problems = [
            Problem(
                f"node {number}",
                f"{name} is {theirs[name]}, and on node 0 {first[name]}",
                "make the nodes equal",
            )
            for number, theirs in enumerate(others, 1)
            for name in sorted(first.keys() & theirs.keys())
            if first[name] != theirs[name]
        ]
        if self._shared is not None and self.number != 0 and not self._sees_mark(self._shared):
            fact = f"{self._shared} is another folder than on node 0"
            fix = "set save.directory to storage that every node sees at the same path"
            problems.append(Problem("save.directory", fact, fix))
            self.announce_refusal(tuple(problems))
        if problems:
            raise LaunchError(problems)

    def _sees_mark(self, folder: Path) -> bool:
        """Whether node 0's mark is there; a network file system may show it a little later."""
        deadline = time.monotonic() + LOST_AFTER / 2
        while time.monotonic() < deadline:
            try:
                if (folder / _MARK).read_text(encoding="utf-8") == self._line.head:
                    return True
            except OSError:
                pass
            time.sleep(POLL_PERIOD)
        return False


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
