"""Watches the pulses of the ranks from outside: who is hung, who is slow.

A rank is hung when its pulse stands still for longer than it may. Inside a step that is a few
seconds, or a few steps where these are long; the first step (which compiles), evaluating and saving
may take their time. A rank that the kernel reports as stopped is hung wherever it is.

When one rank is hung the others soon wait for it, so all pulses stand still. The one to blame is
stopped, or the furthest behind, or the only one that computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from shardtune.core.pulse import IN_A_STEP, Beat, Pulses
from shardtune.launch.process import STOPPED, cpu_seconds, state

STEPS = 2.5  # median steps that a rank may stay in one phase of a step
PAUSE = 30 * 60.0  # seconds for what takes its time; the collectives themselves give up then
STOPPED_FOR = 2.0  # seconds
SUSPICIOUS = 1.0  # seconds of silence after which we look closer
WINDOW = 10  # steps over which ranks are compared
SLOWER = 1.6  # times the median of the others
SHARE = 0.2  # and so much of a step's time, or it isn't worth a word


@dataclass(frozen=True)
class Hung:
    """A rank whose pulse stands still; no rank where all wait for each other."""

    rank: int | None
    beat: Beat
    seconds: float
    stopped: bool
    overdue: float = 0.0
    """Seconds beyond those that it might have been silent."""


@dataclass(frozen=True)
class Slow:
    """A rank that makes the others wait, step after step."""

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


@dataclass(frozen=True)
class _Mark:
    """All ranks when the last of them began a step."""

    time: float
    step: int
    beats: Mapping[int, Beat]

    def spent(self, rank: int, phase: str) -> float:
        seconds: float = getattr(self.beats[rank], f"{phase}_seconds")
        return seconds


class Watcher:
    """Looks at all ranks; `patience` is the least silence, in seconds, that makes a rank hung."""

    def __init__(self, pulses: Pulses, patience: float, now: float) -> None:
        self.pulses = pulses
        self.patience = patience
        self._ranks = {rank: _Seen(Beat(), now) for rank in range(pulses.ranks)}
        self._last_look = now
        self._steps: deque[float] = deque(maxlen=31)
        self._step_begun: float | None = None
        self._step = 0
        self._marks: deque[_Mark] = deque(maxlen=WINDOW + 1)
        self._told: set[tuple[int, str]] = set()

    def beat(self, rank: int) -> Beat:
        return self.pulses.read(rank)

    @property
    def step(self) -> int:
        """The step that every rank has begun."""
        return self._step

    def hung(self, alive: Mapping[int, int], now: float) -> Hung | None:
        """The hung rank among those alive (rank to process id), if there is one by now."""
        late = now - self._last_look > SUSPICIOUS  # we were stopped or starved ourselves
        self._last_look = now
        for rank in alive:
            seen, beat = self._ranks[rank], self.pulses.read(rank)
            if beat.beats != seen.beat.beats or late:
                seen.beat, seen.changed, seen.cpu = beat, now, None
                seen.first_step = seen.first_step or beat.step
        self._count_step(alive, now)
        silent = {rank: now - self._ranks[rank].changed for rank in alive}
        closer = [rank for rank, seconds in silent.items() if seconds > SUSPICIOUS]
        for rank in closer:
            if self._ranks[rank].cpu is None:
                self._ranks[rank].cpu = cpu_seconds(alive[rank])
        for rank in closer:
            if silent[rank] > STOPPED_FOR and state(alive[rank]) == STOPPED:
                return Hung(rank, self._ranks[rank].beat, silent[rank], stopped=True)
        overdue = max(silent[rank] - self._limit(self._ranks[rank]) for rank in alive)
        if overdue <= 0:
            return None
        blamed = self._blamed(alive)
        beat = self._ranks[blamed if blamed is not None else min(alive)].beat
        seconds = silent[blamed] if blamed is not None else min(silent.values())
        return Hung(blamed, beat, seconds, stopped=False, overdue=overdue)

    def slow(self) -> Slow | None:
        """A rank that has become a straggler, said once for each phase."""
        if len(self._marks) <= WINDOW:
            return None
        first, last = self._marks[0], self._marks[-1]
        steps = last.step - first.step
        for phase in ("data", "forward"):
            spent = {
                rank: last.spent(rank, phase) - first.spent(rank, phase) for rank in last.beats
            }
            for rank, own in spent.items():
                others = median(value for other, value in spent.items() if other != rank)
                worth = own - others > SHARE * (last.time - first.time)
                if own > SLOWER * others and worth and (rank, phase) not in self._told:
                    self._told.add((rank, phase))
                    return Slow(rank, phase, own / steps, others / steps)
        return None

    def _limit(self, seen: _Seen) -> float:
        beat = seen.beat
        if beat.phase not in IN_A_STEP or beat.step <= seen.first_step:
            return PAUSE
        return max(self.patience, STEPS * median(self._steps) if self._steps else 0.0)

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

    def _blamed(self, alive: Mapping[int, int]) -> int | None:
        if len(alive) == 1:
            return next(iter(alive))
        beats = {rank: self._ranks[rank].beat.beats for rank in alive}
        last = [rank for rank in beats if beats[rank] == min(beats.values())]
        if len(last) == 1:
            return last[0]
        busy = [rank for rank in last if self._burns(rank, alive[rank])]
        return busy[0] if len(busy) == 1 else None

    def _burns(self, rank: int, pid: int) -> bool:
        """Whether it has used the processor since it became suspicious."""
        seen = self._ranks[rank]
        return seen.cpu is not None and cpu_seconds(pid) - seen.cpu > SUSPICIOUS / 2
