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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from shardtune.launch import INTERRUPTED, PREEMPTED
from shardtune.launch.failure import Failure, failure_of_dead_ranks, failure_of_hung_rank
from shardtune.launch.peers import Launchers, SingleNode
from shardtune.launch.process_info import oom_kills
from shardtune.launch.restart_policy import (
    RestartPolicy,
    count_faults,
    halvings,
    past_attempts,
    refuse_restart,
)
from shardtune.launch.watchdog import HungRank, Watchdog
from shardtune.launch.workers import Workers

POLL_SECONDS = 0.1  # between two polls of the ranks
REMOTE_REPORT_SECONDS = 30.0  # seconds in which another node has to report its own hung rank
HANGUP_GRACE = 4.0  # seconds to leave when the terminal closes: nobody is there to wait
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local(
    command: Sequence[str],
    *,
    processes: int,
    threads: int,
    logs: Path,
    policy: RestartPolicy | None = None,
    again: Callable[[int], Sequence[str]] | None = None,
    launchers: Launchers | None = None,
) -> int:
    """Runs `python COMMAND...` once per rank. Returns the exit code; LaunchError if it failed.

    `again(halvings)` is the command that goes on from the last checkpoint. SIGINT and SIGTERM ask
    the ranks to stop after their step, a second signal kills them. One that a rank gets from
    somebody else stops all of them as well, with the same exit code. With `launchers` these are the
    ranks of one node of several, which all do the same.
    """
    policy, launchers = policy or RestartPolicy(), launchers or SingleNode(processes)
    events = Events(
        logs / (f"events-{launchers.number}.jsonl" if launchers.number else "events.jsonl")
    )
    earlier = past_attempts(logs)
    with _heeding_signals() as signals, closing(launchers):
        while (assignment := launchers.wait_for_nodes(signals.cancelled)) is not None:
            failures = launchers.past_failures()
            if failures and again is not None:
                command = again(halvings(failures, policy))
            folder = logs / f"attempt-{earlier + assignment.attempt}"
            workers = Workers(command, assignment, threads, folder)
            outcome = _attempt(workers, launchers, policy, signals, events)
            if isinstance(outcome, int):
                return outcome
            failures.append(outcome)
            reduced = halvings(failures, policy) > halvings(failures[:-1], policy)
            refused = None if reduced else refuse_restart(failures, policy)
            if again is None or signals.came or refused is not None:
                events.tell("failed", outcome, outcome.cause, said=False)
                raise outcome.error(*(refused or []))
            what = "half the micro-batch" if reduced else f"restart {count_faults(failures)}"
            limit = "" if reduced else f" of {policy.restarts}"
            text = f"{_in_full(outcome)}\ngoing on from the last checkpoint ({what}{limit})"
            events.tell("restart", outcome, text)
            if not launchers.next_attempt(signals.cancelled):
                break
        return signals.code


@dataclass
class Signals:
    """The signals that this process got, in their order."""

    came: list[int] = field(default_factory=list)

    def cancelled(self) -> bool:
        return bool(self.came)

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


def _attempt(
    workers: Workers, launchers: Launchers, policy: RestartPolicy, signals: Signals, events: Events
) -> int | Failure:
    """Sees one group of ranks to its end: the exit code, or how it failed."""
    kills = oom_kills()
    launchers.publish_heartbeats(workers.heartbeats)
    watcher = Watchdog(workers.heartbeats, policy.patience, time.monotonic())
    deadline: float | None = None
    try:
        while True:
            workers.show_output()
            codes = workers.exit_codes()
            if any(code and not _has_stopped(workers, rank, code) for rank, code in codes.items()):
                codes = workers.final_exit_codes()
                early = _code_of_early_signal(codes)
                if signals.came and early:
                    return signals.code
                if early and not launchers.remote_ranks():
                    return early
                return launchers.agree_on_cause(failure_of_dead_ranks(workers, codes, kills))
            alive = workers.alive()
            if not alive:
                return signals.code or max(codes.values())
            now = time.monotonic()
            if len(signals.came) > 1 or (deadline is not None and now > deadline):
                _say_left(signals, policy)
                return signals.code
            if signals.came and deadline is None:
                deadline = now + _ask_to_stop(workers, signals, policy)
            if (reported := launchers.remote_failure(watcher.step)) is not None:
                return reported
            hung = watcher.hung(alive | launchers.remote_ranks(), now)
            if (
                hung is not None
                and not launchers.any_node_silent()
                and _ours_to_report(hung, workers)
            ):
                return launchers.agree_on_cause(failure_of_hung_rank(workers, hung))
            if (slow := watcher.slow()) is not None:
                events.slow(slow.rank, slow.phase, slow.seconds, slow.others)
            time.sleep(POLL_SECONDS)
    finally:
        launchers.publish_heartbeats(None)
        workers.close()
        _restore_terminal()


def _ours_to_report(hung: HungRank, workers: Workers) -> bool:
    """A rank of another node is reported there, with its stack, if that node can."""
    return hung.rank is None or hung.rank in workers.ranks or hung.overdue > REMOTE_REPORT_SECONDS


def _ask_to_stop(workers: Workers, signals: Signals, policy: RestartPolicy) -> float:
    """Passes the request on; returns the seconds that the ranks have for it."""
    first = signals.came[0]
    if first == signal.SIGINT:
        _say("\nstopping after this step; once more to stop at once")
        workers.send_signal(signal.SIGINT)
        return float("inf")  # a person is there to press again
    workers.send_signal(signal.SIGTERM)
    return policy.grace if first == signal.SIGTERM else HANGUP_GRACE


def _say_left(signals: Signals, policy: RestartPolicy) -> None:
    if len(signals.came) == 1 and signals.came[0] == signal.SIGTERM:
        _say(f"the step did not end within launch.grace ({policy.grace:g} s): stopped in it")


def _has_stopped(workers: Workers, rank: int, code: int) -> bool:
    """Whether a rank has ended as all agreed to, because one of them was asked to stop."""
    return code in (INTERRUPTED, PREEMPTED) and workers.heartbeats.read(rank).phase == "finish"


def _code_of_early_signal(codes: dict[int, int]) -> int:
    """The exit code if a rank ended because a signal came before it could heed it, else 0. Others
    may have failed for want of it."""
    ended = set(codes.values())
    if ended & {INTERRUPTED, -signal.SIGINT}:
        return INTERRUPTED
    return PREEMPTED if ended & {PREEMPTED, -signal.SIGTERM} else 0


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
