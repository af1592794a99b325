"""The watchdog of a run on Ray: workers leave heartbeats in the run's folder, the driver looks.

The folder is all that the workers, wherever they are, and the driver share. A thread of each worker
copies its heartbeat there; one that is stopped, or whose interpreter is locked, copies nothing new.
All are watched from the first heartbeat of the last of them on: until then data may be prepared.
When one hangs, the driver leaves a mark, at which the other workers end themselves, and kills those
of its own machine; Ray then ends the rest of the attempt.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardtune.core.host.heartbeat import Heartbeats
from shardtune.errors import Problem
from shardtune.launch import HEARTBEAT_FD
from shardtune.launch.failure import Failure
from shardtune.launch.watchdog import HungRank, Watchdog

PERIOD = 0.5  # seconds between two copies, and two looks
_END = "end"  # the mark


def show_heartbeat(folder: Path, rank: int, ranks: int) -> None:
    """In a worker: from now on its heartbeat is in `folder`, and the mark there ends it."""
    heartbeats = Heartbeats(ranks)
    os.environ[HEARTBEAT_FD] = str(os.dup(heartbeats.file))  # `join_process_group` opens it
    who = {"host": socket.gethostname(), "pid": os.getpid()}
    (folder / f"worker-{rank}.json").write_text(json.dumps(who), encoding="utf-8")

    def show() -> None:
        while not (folder / _END).exists():
            with suppress(OSError):  # a full disk hangs nobody
                (folder / f"beat-{rank}").write_bytes(heartbeats.slots(range(rank, rank + 1)))
            time.sleep(PERIOD)
        with (folder / f"stack-{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        os._exit(1)

    threading.Thread(target=show, daemon=True).start()


class RayWatch:
    """The driver's side: finds who hangs, and ends the attempt."""

    def __init__(self, folder: Path, ranks: int, patience: float) -> None:
        self.hung: HungRank | None = None
        self._folder = folder
        self._heartbeats = Heartbeats(ranks)
        self._watchdog = Watchdog(self._heartbeats, patience, time.monotonic())
        self._ended = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[RayWatch]:
        """Looks, as long as the block lasts."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()
            self._heartbeats.close()

    def failure(self) -> Failure | None:
        """What was found."""
        if self.hung is None:
            return None
        place = "all ranks" if self.hung.rank is None else f"rank {self.hung.rank}"
        fact = f"hung for {self.hung.seconds:.1f} s in {self.hung.beat}"
        if self.hung.stopped:
            fact += ": the process is stopped (SIGSTOP)"
        fix = f"the stacks of the ranks that could write them are in {self._folder}"
        return Failure("fault", self.hung.rank, self.hung.beat.step, (Problem(place, fact, fix),))

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            workers = self._look()
            if not self._all_began():
                continue
            found = self._watchdog.hung(workers, time.monotonic())
            if found is not None:
                self.hung = found
                self._end_attempt()
                return

    def _look(self) -> dict[int, int]:
        """Takes the heartbeats over; returns the process ids, 0 for those of other machines."""
        for rank in range(self._heartbeats.ranks):
            with suppress(OSError):
                slot = (self._folder / f"beat-{rank}").read_bytes()
                if len(slot) == len(self._heartbeats.slots(range(1))):  # not half written
                    self._heartbeats.put(rank, slot)
        return {rank: self._pid_here(rank) for rank in range(self._heartbeats.ranks)}

    def _all_began(self) -> bool:
        """Whether each worker has beaten once. Before that it prepares the data, however long that
        takes, or waits for one that does; whether one is there at all is Ray's to see."""
        return all(self._heartbeats.read(rank).beats for rank in range(self._heartbeats.ranks))

    def _pid_here(self, rank: int) -> int:
        try:
            text = (self._folder / f"worker-{rank}.json").read_text(encoding="utf-8")
            who = json.loads(text)
            return int(who["pid"]) if who["host"] == socket.gethostname() else 0
        except (OSError, ValueError, KeyError):
            return 0

    def _end_attempt(self) -> None:
        (self._folder / _END).touch()
        self._ended.wait(4 * PERIOD)  # in which those that can write their stacks, and leave
        for rank in range(self._heartbeats.ranks):
            if pid := self._pid_here(rank):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
