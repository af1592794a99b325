"""Kills a rank at each system call of a checkpoint write, and looks at what is left.

    python -m tests.exam.kill_in_save [--points N] [--background]

A small run was trained once, undisturbed, and all its checkpoints were kept. For each trial its
ranks are forked again with the state of step 3 in memory, beside a folder that holds the checkpoint
of step 2. Then strace is attached to one of them, told to kill it at its n-th call of a kind (open,
write, fsync, rename ...), and the save begins. What must hold, whatever n: the newest good
checkpoint is that of step 2 or 3, to the bit as the undisturbed run had it; none is damaged; the
same step can be saved again. Of each kind of remains that comes up, one is also trained to the end:
to the bit as the undisturbed run.
n is counted up until the save comes to its end alive.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtune.checkpoint.digest import digest_of
from shardtune.checkpoint.manifest import read_manifest
from shardtune.checkpoint.newest import newest
from shardtune.checkpoint.reader import Reader
from shardtune.checkpoint.saver import Identity, Saver
from shardtune.checkpoint.store import sweep
from shardtune.core.pieces import dealt
from shardtune.core.world import World
from shardtune.launch.join import JoinedWorld
from tests.engines.test_native import batch, make
from tests.ranks import _CONTEXT, on_ranks

CALLS = ("mkdir", "openat", "write", "fsync", "close", "rename", "getdents64", "unlinkat", "rmdir")
"""What a save does to the disk, and what it looks at on the way."""
BEFORE, LAST = 2, 5
"""The step of the checkpoint that is there before the save; the step at which the run ends."""
TIMEOUT = 90
Kill = Callable[[int, Path], Any]
"""Ends the process of that id in the save which begins when the file is there."""


@dataclass(frozen=True)
class Outcome:
    """What came of a kill."""

    killed: bool
    """False when the save was over before the n-th call."""
    left: tuple[str, ...]
    """The folders that were there afterwards."""
    step: int
    """That of the newest good checkpoint."""
    good: bool
    """Whether all was as it must be."""


def advance(world: World, folder: str, until: int) -> str:
    """Goes on from the newest checkpoint to step `until`, saving after each; returns the state."""
    ranks = JoinedWorld(world.rank, world.size, world.rank)
    path = Path(folder)
    if world.rank == 0:
        sweep(path)
    ranks.wait()
    found = newest(path, "run", ranks)
    saver = Saver(path, ranks, keep=LAST, background=True)
    step = 0
    with make(world, optimizer="sgd") as engine:
        if found.checkpoint is not None:
            state = Reader(*found.checkpoint)
            step = state.manifest.step
            engine.load_state(state, state.manifest.numbers)
        while step < until:
            engine.step([batch(10 * step + world.rank)])
            step += 1
            saver.wait()
            saver.save(Identity("run", step, "ddp", ""), *engine.pieces(), {})
        saver.wait()
        return digest_of(engine.state()[0])


def save_again(world: World, source: str, folder: str, background: bool, meeting: str = "") -> None:
    """Saves what `source` holds, as the run did that wrote it; removes the checkpoint before."""
    ranks = JoinedWorld(world.rank, world.size, world.rank)
    state = Reader(Path(source), read_manifest(Path(source)))
    pieces = dealt({key: state[key].clone() for key in state}, world.rank, world.size)
    saver = Saver(Path(folder), ranks, keep=1, background=background)
    if meeting:
        (Path(meeting) / f"ready-{world.rank}").touch()
        while not (Path(meeting) / "go").exists():
            time.sleep(0.002)
    identity = Identity("run", state.manifest.step, "ddp", "")
    saver.save(identity, pieces, state.manifest.numbers, {})
    saver.wait()


def _doomed(
    rank: int, ranks: int, source: str, folder: str, background: bool, meeting: str
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(str(Path(meeting) / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        save_again(World(rank, ranks, rank), source, folder, background, meeting)
    except RuntimeError:  # the other rank is gone
        os._exit(1)
    (Path(meeting) / f"done-{rank}").touch()
    os._exit(0)


def kill_one(exam: Exam, folder: Path, rank: int, kill: Kill) -> bool:
    """Lets the ranks save in `folder` while `kill(pid, go)` ends one. Returns whether it did."""
    ranks = exam.ranks
    with tempfile.TemporaryDirectory() as meeting:
        place = Path(meeting)
        processes = [
            _CONTEXT.Process(
                target=_doomed,
                args=(n, ranks, str(exam.step(BEFORE + 1)), str(folder), exam.background, meeting),
            )
            for n in range(ranks)
        ]
        for process in processes:
            process.start()
        _until(lambda: all((place / f"ready-{n}").exists() for n in range(ranks)))
        pid = processes[rank].pid
        assert pid is not None
        helper = kill(pid, place / "go")
        try:
            _until(
                lambda: (
                    not processes[rank].is_alive()
                    or all((place / f"done-{n}").exists() for n in range(ranks))
                )
            )
            processes[rank].join(timeout=10)
            return not (place / f"done-{rank}").exists()
        finally:
            for process in processes:
                process.kill()
                process.join()
            if helper is not None:
                helper.wait(timeout=30)


def by_strace(call: str, number: int) -> Kill:
    """Kills at the n-th system call of that name, counted from the beginning of the save."""

    def kill(pid: int, go: Path) -> subprocess.Popen[bytes]:
        inject = f"inject={call}:signal=SIGKILL:when={number}"
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(pid), "-e", inject]
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        status = Path(f"/proc/{pid}/status")
        _until(lambda: "TracerPid:\t0\n" not in status.read_text() or tracer.poll() is not None)
        go.touch()
        return tracer

    return kill


def after(seconds: float) -> Kill:
    """Kills so long after the save began; needs nothing but signals."""

    def kill(pid: int, go: Path) -> None:
        go.touch()
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)

    return kill


@dataclass(frozen=True)
class Exam:
    """An undisturbed run with all its checkpoints, and the state in which it ended."""

    folder: Path
    ranks: int
    background: bool
    end: str
    trained: set[tuple[str, ...]] = field(default_factory=set)
    """The kinds of remains from which a run was trained to the end."""

    @staticmethod
    def prepare(folder: Path, ranks: int, *, background: bool) -> Exam:
        end = on_ranks(ranks, advance, str(folder / "whole"), LAST)[0]
        return Exam(folder, ranks, background, end)

    def step(self, number: int) -> Path:
        return self.folder / "whole" / f"step-{number:06d}"

    def sit(self, rank: int, kill: Kill) -> Outcome:
        """One kill, and what comes of it."""
        trial = self.folder / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        shutil.copytree(self.step(BEFORE), trial / self.step(BEFORE).name)
        killed = kill_one(self, trial, rank, kill)
        left = tuple(sorted(path.name.split(".")[-1][:11] for path in trial.iterdir()))
        step, good = self.look(trial)
        sweep(trial)
        good = good and (step, True) == self.look(trial)
        if left not in self.trained:
            self.trained.add(left)
            again = self.folder / "again"
            shutil.rmtree(again, ignore_errors=True)
            shutil.copytree(trial, again)
            ends = on_ranks(self.ranks, advance, str(again), LAST)
            good = good and all(end == self.end for end in ends)
            source = str(self.step(BEFORE + 1))
            on_ranks(self.ranks, save_again, source, str(trial), self.background)
            good = good and self.look(trial) == (BEFORE + 1, True)
        return Outcome(killed, left, step, good)

    def look(self, folder: Path) -> tuple[int, bool]:
        """The newest checkpoint's step, and whether it and all others are as they were."""
        found = newest(folder, "run", JoinedWorld())
        if found.checkpoint is None or found.damaged:
            return 0, False
        step = found.checkpoint[1].step
        expected = self.step(step)
        same = digest_of(Reader(*found.checkpoint)) == digest_of(
            Reader(expected, read_manifest(expected))
        )
        return step, same and step in (BEFORE, BEFORE + 1)


def has_strace() -> bool:
    """Whether strace is there and may attach to a process of ours."""
    if shutil.which("strace") is None:
        return False
    sleeper = subprocess.Popen(["sleep", "5"])
    try:
        tried = subprocess.run(
            ["timeout", "1", "strace", "-qq", "-o", "/dev/null", "-p", str(sleeper.pid)],
            capture_output=True,
            check=False,
        )
        return b"not permitted" not in tried.stderr
    finally:
        sleeper.kill()
        sleeper.wait()


def every_call(exam: Exam, rank: int, most: int) -> list[Outcome]:
    """Kills at the first call of each name, the second, and so on, until the save survives."""
    found = []
    for call in CALLS:
        for number in range(1, most + 1):
            outcome = exam.sit(rank, by_strace(call, number))
            if not outcome.killed:
                break
            found.append(outcome)
            said = "held" if outcome.good else "FAILED"
            left = ", ".join(outcome.left)
            print(f"rank {rank} {call} {number}: step {outcome.step}, {said} ({left})", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--points", type=int, default=10_000, help="calls of a name at most")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--background", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        exam = Exam.prepare(Path(folder), given.ranks, background=given.background)
        outcomes = [o for rank in range(given.ranks) for o in every_call(exam, rank, given.points)]
    good = sum(outcome.good for outcome in outcomes)
    print(f"{good} of {len(outcomes)} kills held")
    return int(good < len(outcomes))


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
