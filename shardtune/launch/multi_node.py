"""The launchers of several nodes: they find each other at node 0, start their ranks together, and
end them together.

Node 0 keeps a key-value store through which they agree, at the address that every node was given
and nowhere else. Each launcher puts its heartbeat there twice a second, with those of its ranks, so
that a hung rank is blamed on the right node. A node that is silent for `LOST_AFTER` seconds is
given up: every launcher then stops its ranks and says why. It may come back (the same command
again): the others wait for it, and all go on from the last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shardtune.core.host.heartbeat import Heartbeats
from shardtune.errors import LaunchError, LaunchRefused, Problem
from shardtune.launch.failure import Failure
from shardtune.launch.failure_consensus import POLL_PERIOD, FailureConsensus
from shardtune.launch.node import Node
from shardtune.launch.node_heartbeats import NodeHeartbeats
from shardtune.launch.node_store import NodeStore
from shardtune.launch.shared_folder import SharedFolder
from shardtune.launch.store_client import LOST_AFTER
from shardtune.launch.workers import Assignment

SUSPECT_AFTER = 3.0  # seconds of silence after which a node is suspected


class MultiNode:
    """This node's place among the launchers. `wait` seconds a node may be missing, at the start or
    after it was lost, before the others give up."""

    def __init__(
        self, node: Node, processes: int, *, wait: float, say: Callable[[str], None]
    ) -> None:
        self.node, self.processes, self.wait, self._say = node, processes, wait, say
        self.number = node.number
        self.must_match: Mapping[str, str | int] = {}
        """What has to be equal on all nodes; set it before `wait_for_nodes`."""
        self._shared: SharedFolder | None = None
        self._heartbeats = NodeHeartbeats(node, processes)
        self._store = NodeStore(node, self._heartbeats, wait=wait, say=say)
        self._failures = FailureConsensus(self._store)
        self._connect()

    @property
    def world(self) -> int:
        """World size: the ranks of all nodes."""
        return self.node.count * self.processes

    # Before an attempt ----------------------------------------------------------------------------

    def wait_for_nodes(self, cancelled: Callable[[], bool]) -> Assignment | None:
        """Returns when every node is ready for this attempt; None if `cancelled` says so before.

        A node may take its time (it may be tokenizing) as long as it gives heartbeats.
        """
        complete = told = time.monotonic()
        self._say_ready()
        while missing := [each for each in self.node.others if not self._store.is_ready(each)]:
            if cancelled():
                return None
            if refused := self._refused():
                raise LaunchRefused(refused)
            now = time.monotonic()
            if self._store.head_is_lost(now):
                self._connect()
                self._say_ready()
            silent = [each for each in missing if not self._heartbeats.is_alive(each, now)]
            complete = complete if silent else now
            if now - complete > self.wait:
                raise LaunchError(self._absent(silent))
            if now - told > 30.0:
                told = now
                doing = "no heartbeat yet" if silent else "getting ready"
                self._say(f"waiting for node {', '.join(map(str, missing))}: {doing}")
            time.sleep(POLL_PERIOD)
        self._refuse_differences()
        attempt, node = self._store.attempt, self.node
        self._store.put(f"running/{attempt}", "yes")
        ranks = self._heartbeats.ranks
        port = self._store.client.port
        return Assignment(ranks, self.world, node.head, port, node.interface, attempt)

    def next_attempt(self, cancelled: Callable[[], bool]) -> bool:
        """Goes on to another attempt; False if `cancelled` says so before node 0 answers."""
        self._heartbeats.reset()
        store = self._store
        if store.is_kept_here:
            store.attempt += 1
            store.put("attempt", str(store.attempt))
            return True
        before, head = store.attempt, store.client.head
        while not cancelled():
            if store.head_is_lost(time.monotonic()):
                self._connect()
            current = store.get("attempt")
            if current is not None and (int(current) > before or store.client.head != head):
                store.attempt = int(current)
                return True
            time.sleep(POLL_PERIOD)
        return False

    def past_failures(self) -> list[Failure]:
        """What ended the attempts before this one, the same on every node."""
        return self._failures.past()

    def all_gather(self, name: str, mine: str) -> list[str]:
        """What each node says under a name, by its number; LaunchError if one is lost."""
        self._store.put(f"say/{name}/{self.number}", mine)
        complete = time.monotonic()
        while True:
            told = [self._store.get(f"say/{name}/{number}") for number in range(self.node.count)]
            if (said := [each for each in told if each is not None]) and len(said) == len(told):
                return said
            now = time.monotonic()
            missing = [number for number, each in enumerate(told) if each is None]
            silent = [each for each in missing if not self._heartbeats.is_alive(each, now)]
            complete = complete if silent else now
            if self._store.head_is_lost(now):
                raise LaunchError(self._lost_head(now, 0).problems)
            if now - complete > self.wait:
                raise LaunchError(self._absent(silent))
            time.sleep(POLL_PERIOD)

    def announce_refusal(self, problems: tuple[Problem, ...]) -> None:
        """Says that this node can't take part, and why; the others stop waiting for it."""
        place = f"node {self.number}"
        told = tuple(Problem(f"{place}: {each.place}", each.fact, each.fix) for each in problems)
        self._failures.report(Failure("problem", None, 0, told))

    def require_shared_folder(self, folder: Path) -> None:
        """A folder that has to be the same one on all nodes: `wait_for_nodes` checks it."""
        self._shared = SharedFolder(folder)

    # During an attempt ----------------------------------------------------------------------------

    def publish_heartbeats(self, heartbeats: Heartbeats | None) -> None:
        """From now on the others see the heartbeats of this node's ranks, and it sees theirs."""
        self._heartbeats.publish(heartbeats)

    def remote_ranks(self) -> dict[int, int]:
        """The ranks of other nodes, each with a process id that nobody has."""
        return {rank: 0 for rank in range(self.world) if rank not in self._heartbeats.ranks}

    def any_node_silent(self) -> bool:
        """Whether some node is silent, so that what hangs here may only be waiting for it."""
        now = time.monotonic()
        silence = max(self._store.head_silence(now), self._heartbeats.longest_silence(now))
        return silence > SUSPECT_AFTER

    def remote_failure(self, step: int) -> Failure | None:
        """What another node has reported, or that it is lost."""
        now = time.monotonic()
        if self._store.head_is_lost(now):
            return self._lost_head(now, step)
        for number, silent in self._heartbeats.lost(now).items():
            if not self._store.has_left(number):
                return self._failures.agree(self._failures.lost_node(number, silent, step))
        return self._failures.agree(None) if self._failures.reported() else None

    def agree_on_cause(self, own: Failure) -> Failure:
        """One cause for all nodes, of those that they report within a moment."""
        return self._failures.agree(own)

    def close(self) -> None:
        """Says that this node is done. Node 0 stays until the others are done too."""
        self._heartbeats.publish(None)
        self._store.leave()
        deadline = time.monotonic() + LOST_AFTER / 2
        while self._store.is_kept_here and time.monotonic() < deadline:
            now = time.monotonic()
            waits = [n for n in self.node.others if self._heartbeats.is_alive(n, now)]
            if all(map(self._store.has_left, waits)):
                break
            time.sleep(POLL_PERIOD)
        if self._shared is not None and self.number == 0:
            self._shared.unmark()
        self._store.close()

    # Inside ---------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """A launcher that comes again ends the attempt that it was part of in its earlier life."""
        if self._store.open():
            fact = "its launcher was started again"
            fix = "nothing: all nodes go on from the last checkpoint"
            problem = Problem(f"node {self.number}", fact, fix)
            self._failures.agree(Failure("fault", None, 0, (problem,)))
            self.next_attempt(lambda: False)

    def _say_ready(self) -> None:
        if self._shared is not None and self.number == 0:
            self._shared.mark(self._store.client.head)
        self._store.set_ready(self.must_match)

    def _refused(self) -> list[Problem]:
        """Why another node can't take part."""
        told = [each for each in self._failures.reported() if each.kind == "problem"]
        return [problem for failure in told for problem in failure.problems]

    def _lost_head(self, now: float, step: int) -> Failure:
        return self._failures.lost_node(0, self._store.head_silence(now), step)

    def _absent(self, silent: list[int]) -> list[Problem]:
        fact = f"did not join within {self.wait:g} s (launch.rejoin)"
        fix = "start the same command there with its own --node-rank, and open node 0's port"
        return [Problem(f"node {number}", fact, fix) for number in silent]

    def _refuse_differences(self) -> None:
        """Nodes that would not compute the same must not begin."""
        first, *others = (self._store.must_match(n) for n in range(self.node.count))
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
        if (other := self._other_folder()) is not None:
            problems.append(other)
            self.announce_refusal(tuple(problems))
        if problems:
            raise LaunchRefused(problems)

    def _other_folder(self) -> Problem | None:
        """What is wrong if this node doesn't see the folder of node 0."""
        shared, head = self._shared, self._store.client.head
        if self.number == 0 or shared is None or shared.has_mark(head, within=LOST_AFTER / 2):
            return None
        fact = f"{shared.path} is another folder than on node 0"
        fix = "set save.directory to storage that every node sees at the same path"
        return Problem("save.directory", fact, fix)
