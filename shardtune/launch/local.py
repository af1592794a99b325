"""Runs a job's ranks on this machine to their end, through faults where that can be done.

An attempt ends well, is stopped by a signal, or fails. After a failure that may pass, the ranks are
started again to go on from their last checkpoint: a limited number of times, and never a third time
at the same step, because then it isn't chance.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from shardtune.errors import LaunchError, Problem
from shardtune.launch import INTERRUPTED
from shardtune.launch.failure import Failure, of_dead_ranks, of_hung_rank
from shardtune.launch.group import Group
from shardtune.launch.process import memory_kills
from shardtune.launch.watch import Watcher

PERIOD = 0.1  # seconds between two looks at the ranks
SAME_STEP = 3  # failures at one step that end a run
HANG_UP = 4.0  # seconds to leave when the terminal closes: nobody is there to wait
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Policy:
    """How much a run is helped along."""

    restarts: int = 0
    """How often it may be started again after a fault."""
    patience: float = 4.0
    """Seconds of silence inside a step after which a rank counts as hung, if steps are short."""
    grace: float = 30.0
    """Seconds that the ranks have after SIGTERM."""
    halvings: int = 0
    """How often the micro-batch may be halved when memory runs out."""


def run_local(
    command: Sequence[str],
    *,
    processes: int,
    threads: int,
    logs: Path,
    policy: Policy | None = None,
    again: Callable[[int], Sequence[str]] | None = None,
) -> int:
    """Runs `python COMMAND...` once per rank. Returns the exit code; LaunchError if it failed.

    `again(halvings)` is the command that goes on from the last checkpoint. SIGINT and SIGTERM ask
    the ranks to stop after their step, a second signal kills them.
    """
    policy = policy or Policy()
    events = Events(logs / "events.jsonl")
    failures: list[Failure] = []
    halvings = 0
    with _heeding_signals() as signals:
        while True:
            folder = _new_folder(logs)
            outcome = _attempt(Group(command, processes, threads, folder), policy, signals, events)
            if isinstance(outcome, int):
                return outcome
            failures.append(outcome)
            reduced = outcome.kind == "memory" and halvings < policy.halvings
            halvings += reduced
            refused = None if reduced else _refuse_restart(failures, policy)
            if again is None or signals.came or refused is not None:
                events.tell("failed", outcome, outcome.cause, said=False)
                raise LaunchError([*outcome.problems, *(refused or [])])
            what = "half the micro-batch" if reduced else f"restart {_faults(failures)}"
            limit = "" if reduced else f" of {policy.restarts}"
            text = f"{_in_full(outcome)}\ngoing on from the last checkpoint ({what}{limit})"
            events.tell("restart", outcome, text)
            command = again(halvings)


def _new_folder(logs: Path) -> Path:
    """One for each attempt, also of a run that is resumed: last words of an earlier one, read
    again, would tell a wrong cause."""
    return logs / f"attempt-{sum(1 for _ in logs.glob('attempt-*'))}"


def _faults(failures: Sequence[Failure]) -> int:
    return sum(failure.kind == "fault" for failure in failures)


def _refuse_restart(failures: Sequence[Failure], policy: Policy) -> list[Problem] | None:
    """None if the run may be started again; else what is to be said about that besides."""
    last = failures[-1]
    if last.kind != "fault" or policy.restarts == 0:
        return []
    same = Counter(failure.step for failure in failures)[last.step]
    fix = "mend the cause above, then go on with --resume"
    if same >= SAME_STEP:
        fact = f"failed {same} times: that is no chance, so the run was not started again"
        return [Problem(f"step {last.step}", fact, fix)]
    if _faults(failures) > policy.restarts:
        fact = f"the run was started again {policy.restarts} times, and failed again"
        return [Problem("launch.restarts", fact, fix)]
    return None


@dataclass
class Signals:
    """The signals that this process got, in their order."""

    came: list[int] = field(default_factory=list)

    @property
    def code(self) -> int:
        return 128 + self.came[0] if self.came else 0


@contextmanager
def _heeding_signals() -> Iterator[Signals]:
    signals = Signals()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.came.append(number)

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _attempt(group: Group, policy: Policy, signals: Signals, events: Events) -> int | Failure:
    """Sees one group of ranks to its end: the exit code, or how it failed."""
    kills = memory_kills()
    watcher = Watcher(group.pulses, policy.patience, time.monotonic())
    deadline: float | None = None
    try:
        while True:
            codes = group.codes()
            if any(codes.values()):
                if signals.came and _were_interrupted(codes):
                    return signals.code
                return of_dead_ranks(group, codes, kills)
            alive = group.alive()
            if not alive:
                return signals.code
            now = time.monotonic()
            if len(signals.came) > 1 or (deadline is not None and now > deadline):
                _say_left(signals, policy)
                return signals.code
            if signals.came and deadline is None:
                deadline = now + _ask_to_stop(group, signals, policy)
            if (hung := watcher.hung(alive, now)) is not None:
                return of_hung_rank(group, hung)
            if (slow := watcher.slow()) is not None:
                events.slow(slow.rank, slow.phase, slow.seconds, slow.others)
            time.sleep(PERIOD)
    finally:
        group.close()
        _restore_terminal()


def _ask_to_stop(group: Group, signals: Signals, policy: Policy) -> float:
    """Passes the wish on; returns the seconds that the ranks have to fulfil it."""
    first = signals.came[0]
    if first == signal.SIGINT:
        _say("\nstopping after this step; once more to stop at once")
        group.tell(signal.SIGINT)
        return float("inf")  # a person is there to press again
    group.tell(signal.SIGTERM)
    return policy.grace if first == signal.SIGTERM else HANG_UP


def _say_left(signals: Signals, policy: Policy) -> None:
    if len(signals.came) == 1 and signals.came[0] == signal.SIGTERM:
        _say(f"the step did not end within launch.grace ({policy.grace:g} s): stopped in it")


def _were_interrupted(codes: dict[int, int]) -> bool:
    """Whether a rank ended because the signal came before it could heed it. Others may have failed
    for want of it."""
    return bool({INTERRUPTED, -signal.SIGINT, -signal.SIGTERM} & set(codes.values()))


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)


def _restore_terminal() -> None:
    """A rank that was killed in its live view has hidden the cursor."""
    with suppress(OSError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")
            sys.stdout.flush()


def _in_full(failure: Failure) -> str:
    return "\n".join(f"{problem.place}: {problem.fact}" for problem in failure.problems)


@dataclass(frozen=True)
class Events:
    """What the launcher saw: a line for the person, and one of JSON for everyone else."""

    path: Path

    def tell(self, kind: str, failure: Failure, text: str, *, said: bool = True) -> None:
        if said:
            _say(text)
        self._write(kind, rank=failure.rank, step=failure.step, cause=failure.cause, text=text)

    def slow(self, rank: int, phase: str, own: float, others: float) -> None:
        fact = f"rank {rank} is slow: {own:.3g} s a step in {phase}, the others {others:.3g} s"
        _say(fact)
        self._write("slow", rank=rank, phase=phase, seconds=own, others=others)

    def _write(self, kind: str, **facts: object) -> None:
        line = json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n"
        with suppress(OSError):  # a full disk must not end a run that could go on
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
