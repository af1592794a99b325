"""The watchdog: reads the heartbeats of the ranks from outside, and finds who is hung or slow.

A rank is hung when its heartbeat stands still for longer than it may. Inside a step that is a few
seconds, or a few steps where these are long; the first step, compiling, evaluating and saving may
take their time. A rank that the kernel reports as stopped is hung wherever it is. Time in which
a rank waited for a processor doesn't count: a machine that is too busy hangs nobody.

When one rank is hung the others soon wait for it, so all heartbeats stand still. The one to blame
is stopped, or the furthest behind, or the only one that computes. While it moves, it is only slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from shardtune.core.host.heartbeat import IN_A_STEP, Beat, Heartbeats
from shardtune.launch.process_info import STOPPED, cpu_seconds, process_state, runqueue_seconds

HUNG_AFTER_STEPS = 2.5  # median steps that a rank may stay in one phase of a step
LONGEST_PAUSE = 30 * 60.0  # seconds for what takes its time: then collectives give up, too
STOPPED_FOR = 2.0  # seconds
SUSPECT_AFTER_SILENCE = 1.0  # seconds of silence after which we look closer
STRAGGLER_WINDOW = 10  # steps over which ranks are compared
STRAGGLER_RATIO = 1.6  # times the median of the others
STRAGGLER_SHARE = 0.2  # and so much of a step's time, or it isn't worth a word


@dataclass(frozen=True)
class HungRank:
    """A rank whose heartbeat stands still; no rank where all wait for each other."""

    rank: int | None
    beat: Beat
    seconds: float
    stopped: bool
    overdue: float = 0.0
    """Seconds beyond those that it might have been silent."""


@dataclass(frozen=True)
class SlowRank:
    """A straggler: a rank that makes the others wait, step after step."""

    rank: int
    phase: str
    seconds: float
    """A step's share of it, on this rank and on the others."""
    others: float


@dataclass
class _Seen:
    """A rank as we know it."""

    beat: Beat
    changed: float
    first_step: int = 0
    cpu: float | None = None
    """Processor time when it became suspicious."""
    queued: float = 0.0
    """The time that it had waited for a processor by then."""


@dataclass(frozen=True)
class _Mark:
    """All ranks when the last of them began a step."""

    time: float
    step: int
    beats: Mapping[int, Beat]

    def spent(self, rank: int, phase: str) -> float:
        seconds: float = getattr(self.beats[rank], f"{phase}_seconds")
        return seconds


class Watchdog:
    """Looks at all ranks; `patience` is the least silence, in seconds, that makes a rank hung."""

    def __init__(self, heartbeats: Heartbeats, patience: float, now: float) -> None:
        self.heartbeats = heartbeats
        self.patience = patience
        self._ranks = {rank: _Seen(Beat(), now) for rank in range(heartbeats.ranks)}
        self._last_look = now
        self._steps: deque[float] = deque(maxlen=31)
        self._step_begun: float | None = None
        self._step = 0
        self._marks: deque[_Mark] = deque(maxlen=STRAGGLER_WINDOW + 1)
        self._told: set[tuple[int, str]] = set()

    def beat(self, rank: int) -> Beat:
        return self.heartbeats.read(rank)

    @property
    def step(self) -> int:
        """The step that every rank has begun."""
        return self._step

    def hung(self, alive: Mapping[int, int], now: float) -> HungRank | None:
        """The hung rank among those alive (rank to process id), if there is one by now."""
        late = now - self._last_look > SUSPECT_AFTER_SILENCE  # we were stopped or starved ourselves
        self._last_look = now
        for rank in alive:
            seen, beat = self._ranks[rank], self.heartbeats.read(rank)
            if beat.beats != seen.beat.beats or late:
                seen.beat, seen.changed, seen.cpu = beat, now, None
                seen.first_step = seen.first_step or beat.step
        self._count_step(alive, now)
        silent = {rank: self._silence(self._ranks[rank], pid, now) for rank, pid in alive.items()}
        for rank, pid in alive.items():
            if silent[rank] > STOPPED_FOR and process_state(pid) == STOPPED:
                return HungRank(rank, self._ranks[rank].beat, silent[rank], stopped=True)
        beyond = {rank: silent[rank] - self._limit(self._ranks[rank]) for rank in alive}
        if max(beyond.values()) <= 0:
            return None
        blamed = self._blamed(alive)
        overdue = min(beyond[each] for each in blamed)
        if overdue <= 0:
            return None
        culprit = blamed[0] if len(blamed) == 1 else None
        seconds = min(silent[each] for each in blamed)
        beat = self._ranks[blamed[0]].beat
        return HungRank(culprit, beat, seconds, stopped=False, overdue=overdue)

    def slow(self) -> SlowRank | None:
        """A rank that has become a straggler, said once for each phase."""
        if len(self._marks) <= STRAGGLER_WINDOW:
            return None
        first, last = self._marks[0], self._marks[-1]
        steps = last.step - first.step
        for phase in ("data", "forward"):
            spent = {
                rank: last.spent(rank, phase) - first.spent(rank, phase) for rank in last.beats
            }
            for rank, own in spent.items():
                others = median(value for other, value in spent.items() if other != rank)
                worth = own - others > STRAGGLER_SHARE * (last.time - first.time)
                if own > STRAGGLER_RATIO * others and worth and (rank, phase) not in self._told:
                    self._told.add((rank, phase))
                    return SlowRank(rank, phase, own / steps, others / steps)
        return None

    def _silence(self, seen: _Seen, pid: int, now: float) -> float:
        """Seconds since it last moved, without those in which it wasn't given a processor."""
        silent = now - seen.changed
        if silent <= SUSPECT_AFTER_SILENCE:
            return silent
        if seen.cpu is None:
            seen.cpu, seen.queued = cpu_seconds(pid), runqueue_seconds(pid)
        return silent - (runqueue_seconds(pid) - seen.queued)

    def _limit(self, seen: _Seen) -> float:
        beat = seen.beat
        if beat.phase not in IN_A_STEP or beat.step <= seen.first_step:
            return LONGEST_PAUSE
        return max(self.patience, HUNG_AFTER_STEPS * median(self._steps) if self._steps else 0.0)

    def _count_step(self, alive: Mapping[int, int], now: float) -> None:
        """Takes a mark when the last rank has begun another step."""
        beats = {rank: self._ranks[rank].beat for rank in alive}
        step = min((beat.step for beat in beats.values()), default=0)
        if step <= self._step:
            return
        if self._step_begun is not None and self._step > 0:
            self._steps.append((now - self._step_begun) / (step - self._step))
        self._step, self._step_begun = step, now
        if len(beats) > 1:
            self._marks.append(_Mark(now, step, beats))

    def _blamed(self, alive: Mapping[int, int]) -> list[int]:
        """Who holds the others up; several where they can't be told apart."""
        beats = {rank: self._ranks[rank].beat for rank in alive}
        # In a collective a rank waits for another. Of ranks that do the same in a step, as those of
        # a pipeline don't, the one with the fewest beats is behind.
        places = {
            rank: (beat.step, beat.phase == "collective", beat.within)
            for rank, beat in beats.items()
        }
        last = [rank for rank in places if places[rank] == min(places.values())]
        busy = [rank for rank in last if self._burns(rank, alive[rank])]
        return busy if len(busy) == 1 else last

    def _burns(self, rank: int, pid: int) -> bool:
        """Whether it has used the processor since it became suspicious."""
        seen = self._ranks[rank]
        return seen.cpu is not None and cpu_seconds(pid) - seen.cpu > SUSPECT_AFTER_SILENCE / 2
