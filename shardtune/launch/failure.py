"""Why an attempt failed, told by whoever knows best, and what may be done about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtune.core.host.heartbeat import Beat
from shardtune.errors import FailureKind, LaunchError, LaunchRefused, Problem
from shardtune.launch.error_file import ErrorReport
from shardtune.launch.process_info import oom_kills, request_stack
from shardtune.launch.watchdog import HungRank
from shardtune.launch.workers import Workers


@dataclass(frozen=True)
class Failure:
    """A `fault` may pass when the run is started again; `memory` when it needs less of it; a
    `problem` only when a person acts."""

    kind: FailureKind
    rank: int | None
    step: int
    problems: tuple[Problem, ...]
    reported: bool = True
    """Whether a rank has said so itself; one that is killed can't."""
    refused: bool = False
    """Whether only a person can help, by a change of job, data, model or machine."""

    @property
    def cause(self) -> str:
        """One line."""
        first = self.problems[0]
        return f"{first.place}: {first.fact}".strip().splitlines()[0]

    def error(self, *further: Problem) -> LaunchError:
        """What the launcher raises in the end."""
        kind = LaunchRefused if self.refused else LaunchError
        return kind([*self.problems, *further])


def failure_of_dead_ranks(workers: Workers, codes: Mapping[int, int], kills_before: int) -> Failure:
    """The rank that failed first. Who was killed, or died without a report, comes before those that
    complain: they have only lost their peer."""
    failed = {rank: code for rank, code in codes.items() if code != 0}
    words = {rank: said for rank in failed if (said := workers.error_report(rank))}
    mute = [rank for rank in failed if rank not in words]
    if mute:
        rank = min(mute, key=lambda rank: failed[rank])  # signals are negative
        return _of_mute(workers, rank, failed[rank], out_of_memory=oom_kills() > kills_before)
    rank, said = min(words.items(), key=lambda item: item[1].time)
    return _of_words(workers, rank, said)


def failure_of_hung_rank(workers: Workers, hung: HungRank) -> Failure:
    """Who hangs, who waits for it and where, and the stack, if the rank can still write it."""
    alive = workers.alive()
    stacks = {rank: request_stack(pid, workers.stack_file(rank)) for rank, pid in alive.items()}
    for_how_long = f"hung for {hung.seconds:.1f} s in {hung.beat}"
    waiting = _waiting(workers, stacks, hung.rank)
    if hung.rank is None:
        text = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in stacks.items() if stack)
        fact = f"{for_how_long}; they wait for each other: {waiting}\n{text}"
        place = rank_ranges(range(workers.heartbeats.ranks))
    else:
        place = f"rank {hung.rank}"
        fact = f"{for_how_long}; {waiting}" if waiting else for_how_long
        if hung.stopped:
            fact += ": the process is stopped (SIGSTOP), so it can't show its stack"
        elif hung.rank not in workers.ranks:
            fact += "; it runs on another node, which didn't report it"
        elif stack := stacks.get(hung.rank):
            fact += f"; its stack, innermost first:\n{stack}"
        else:
            fact += "; it gave no stack"
    fix = f"the stacks of all ranks are in {workers.logs}"
    return Failure("fault", hung.rank, hung.beat.step, (Problem(place, fact, fix),))


def _waiting(workers: Workers, stacks: Mapping[int, str], blamed: int | None) -> str:
    """Where the other ranks are: `ranks 0-2 wait in all-reduce of step 7 (backward)`. Of ranks on
    other nodes only the heartbeat is known."""
    places: dict[str, list[int]] = {}
    for rank in range(workers.heartbeats.ranks):
        if rank != blamed:
            where, op = str(workers.heartbeats.read(rank)), collective_in(stacks.get(rank, ""))
            places.setdefault(f"{op} of {where}" if op else where, []).append(rank)
    return ", ".join(
        f"{rank_ranges(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {where}"
        for where, ranks in places.items()
    )


_COLLECTIVE = re.compile(
    r" in _?(?:foreach_)?(all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|barrier|gather|"
    r"scatter|isend|irecv|send|recv|reduce)(?:_\w+|coalesced)?$",
    re.MULTILINE,
)


def collective_in(stack: str) -> str:
    """The collective that a stack is in, innermost first; empty if it is in none that we know."""
    found = _COLLECTIVE.search(stack)
    return found[1].replace("_", "-") if found else ""


def rank_ranges(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _of_words(workers: Workers, rank: int, words: ErrorReport) -> Failure:
    beat = workers.heartbeats.read(rank)
    if words.problems:
        # Where ranks judge together, all of them say who is to blame, and any may be the first.
        named = re.fullmatch(r"rank (\d+)", words.problems[0].place)
        blamed = int(named[1]) if named else rank
        refused = words.kind != "fault"
        return Failure(words.kind, blamed, beat.step, words.problems, refused=refused)
    fix = f"a bug of shardtune or of a library; the ranks' own output is in {workers.logs}"
    problem = Problem(f"rank {rank}", words.traceback, fix)
    # What fails before the first step does so each time.
    return Failure("fault" if beat.step else "problem", rank, beat.step, (problem,))


def _of_mute(workers: Workers, rank: int, code: int, *, out_of_memory: bool) -> Failure:
    beat = workers.heartbeats.read(rank)
    killed = code == -signal.SIGKILL
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    fact = f"{how} without an error report in {beat}"
    fix = f"see the ranks' own output in {workers.logs}"
    if killed and out_of_memory:
        fact = f"was killed by the kernel, out of memory, in {beat}: {describe_batch(beat)}"
        fix = "lower train.micro_batch (the result stays the same) or start fewer processes"
    elif killed:
        fact += f" ({describe_batch(beat)})" if beat.rows else ""
        fix = "if the machine ran out of memory, lower train.micro_batch or start fewer processes"
    kind: FailureKind = "memory" if killed and out_of_memory else "fault"
    return Failure(kind, rank, beat.step, (Problem(f"rank {rank}", fact, fix),), reported=False)


def describe_batch(beat: Beat) -> str:
    """The micro-batch in work."""
    return (
        f"its micro-batch had {beat.rows} row{'s' * (beat.rows > 1)} of up to {beat.width} tokens"
    )
