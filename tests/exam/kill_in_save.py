"""Kills a rank at each system call of a checkpoint write, and at random moments of a run.

    python -m tests.exam.kill_in_save [--kills 200] [--points N] [--foreground]

A small run was trained once, undisturbed, and all its checkpoints were kept. For each kill inside a
save its ranks are forked again with the state of step 3 in memory, beside a folder that holds the
checkpoint of step 2. Then strace is attached to one of them, told to kill it at its n-th call of a
kind (open, write, fsync, rename ...), and the save begins. n is counted up until the save comes to
its end alive. The other kills strike a run from its first step on, after a random time.

What must hold, whatever the moment: the newest good checkpoint is one that the run had saved, to
the bit as the undisturbed run had it; none is damaged; the run goes on from there and ends to the
bit as the undisturbed one. Of each kind of remains, the step is also saved a second time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
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

from shardtune.checkpoint.async_saver import AsyncSaver, CheckpointIdentity
from shardtune.checkpoint.commit_by_rename import checkpoints, remove_partial
from shardtune.checkpoint.digest import digest_tensors
from shardtune.checkpoint.latest import latest_checkpoint
from shardtune.checkpoint.manifest import read_manifest
from shardtune.checkpoint.reader import Reader
from shardtune.config.job import LoRA
from shardtune.core.progress import Progress
from shardtune.core.tensor_shards import round_robin
from shardtune.core.world import World
from shardtune.launch.process_group import JoinedWorld
from tests.engine.test_native import batch, make
from tests.ranks import _CONTEXT, on_ranks

CALLS = ("mkdir", "openat", "write", "fsync", "close", "rename", "getdents64", "unlinkat", "rmdir")
"""What a save does to the disk, and what it looks at on the way."""
BEFORE, LAST = 2, 5
"""The step of the checkpoint that is there before the save; the step at which the run ends."""
TIMEOUT = 90
NO_STRACE = "strace is not installed, or may not attach to a process (apt-get install strace)"
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


def advance(world: World, folder: str, until: int, meeting: str = "") -> str:
    """Goes on from the newest checkpoint to step `until`, saving after each; returns the state."""
    ranks = JoinedWorld(world.rank, world.size, world.rank)
    path = Path(folder)
    if world.rank == 0:
        remove_partial(path)
    ranks.barrier()
    found = latest_checkpoint(path, "run", ranks)
    saver = AsyncSaver(path, ranks, keep=LAST, background=True)
    step = 0
    with make(world, adapter=LoRA(rank=4, dropout=0.1)) as engine:
        if found.checkpoint is not None:
            state = Reader(*found.checkpoint)
            step = state.manifest.step
            engine.load_state(state, state.manifest.numbers)
        _meet(world, meeting)
        while step < until:
            engine.step([batch(10 * step + world.rank)])
            step += 1
            saver.wait()
            saver.save(CheckpointIdentity("run", step, "ddp", ""), *engine.shards(), Progress())
        saver.wait()
        return digest_tensors(engine.state()[0])


def save_again(world: World, source: str, folder: str, background: bool, meeting: str = "") -> None:
    """Saves what `source` holds, as the run did that wrote it; removes the checkpoint before."""
    ranks = JoinedWorld(world.rank, world.size, world.rank)
    state = Reader(Path(source), read_manifest(Path(source)))
    pieces = round_robin({key: state[key].clone() for key in state}, world.rank, world.size)
    saver = AsyncSaver(Path(folder), ranks, keep=1, background=background)
    _meet(world, meeting)
    identity = CheckpointIdentity("run", state.manifest.step, "ddp", "")
    saver.save(identity, pieces, state.manifest.numbers, Progress())
    saver.wait()


def _meet(world: World, meeting: str) -> None:
    """Waits for the sign to begin, where there is one."""
    if meeting:
        (Path(meeting) / f"ready-{world.rank}").touch()
        while not (Path(meeting) / "go").exists():
            time.sleep(0.002)


def _doomed(
    rank: int, ranks: int, meeting: str, act: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(str(Path(meeting) / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        act(World(rank, ranks, rank), *arguments, meeting)
    except RuntimeError:  # the other rank is gone
        os._exit(1)
    (Path(meeting) / f"done-{rank}").touch()
    os._exit(0)


def kill_one(
    ranks: int, rank: int, kill: Kill, act: Callable[..., object], *arguments: Any
) -> bool:
    """Lets the ranks `act` while `kill(pid, go)` ends one of them. Returns whether it did."""
    with tempfile.TemporaryDirectory() as meeting:
        place = Path(meeting)
        processes = [
            _CONTEXT.Process(target=_doomed, args=(n, ranks, meeting, act, arguments))
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
        with contextlib.suppress(ProcessLookupError):  # it came too late
            os.kill(pid, signal.SIGKILL)

    return kill


@dataclass(frozen=True)
class Exam:
    """An undisturbed run with all its checkpoints, and the state in which it ended."""

    folder: Path
    ranks: int
    background: bool
    end: str
    seconds: float
    """How long it took from its first step on."""
    seen: set[tuple[str, ...]] = field(default_factory=set)
    """The kinds of remains that came up."""

    @staticmethod
    def prepare(folder: Path, ranks: int, *, background: bool) -> Exam:
        whole = folder / "whole"
        end = on_ranks(ranks, advance, str(whole), LAST)[0]
        times = [path.stat().st_mtime for _, path in checkpoints(whole)]
        seconds = (times[-1] - times[0]) * LAST / (LAST - 1)
        return Exam(folder, ranks, background, end, seconds)

    def step(self, number: int) -> Path:
        return self.folder / "whole" / f"step-{number:06d}"

    def in_save(self, rank: int, kill: Kill) -> Outcome:
        """One kill in the save of a step, and what comes of it."""
        trial = self._fresh()
        shutil.copytree(self.step(BEFORE), trial / self.step(BEFORE).name)
        source = str(self.step(BEFORE + 1))
        killed = kill_one(self.ranks, rank, kill, save_again, source, str(trial), self.background)
        left = tuple(sorted(path.name.split(".")[-1][:11] for path in trial.iterdir()))
        step, good = self.look(trial)
        good = good and step in (BEFORE, BEFORE + 1) and self._goes_on(trial, step)
        if left not in self.seen:
            self.seen.add(left)
            on_ranks(self.ranks, save_again, source, str(trial), self.background)
            good = good and self.look(trial) == (BEFORE + 1, True)
        return Outcome(killed, left, step, good)

    def in_run(self, rank: int, seconds: float) -> Outcome:
        """One kill so long after the first step of a run began."""
        trial = self._fresh()
        killed = kill_one(self.ranks, rank, after(seconds), advance, str(trial), LAST)
        left = tuple(sorted(path.name for path in trial.iterdir()))
        step, good = self.look(trial)
        return Outcome(killed, left, step, good and self._goes_on(trial, step))

    def _fresh(self) -> Path:
        trial = self.folder / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        trial.mkdir()
        return trial

    def _goes_on(self, trial: Path, step: int) -> bool:
        """Whether a copy of what is left, swept, holds the same, and ends as the whole run did."""
        again = self.folder / "again"
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(trial, again)
        remove_partial(again)
        same = self.look(again) == (step, True)
        ends = on_ranks(self.ranks, advance, str(again), LAST)
        return same and all(end == self.end for end in ends)

    def look(self, folder: Path) -> tuple[int, bool]:
        """The newest checkpoint's step, 0 without one; and whether it is as it was."""
        if not checkpoints(folder):
            return 0, True
        found = latest_checkpoint(folder, "run", JoinedWorld())
        if found.checkpoint is None or found.damaged:
            return 0, False
        step = found.checkpoint[1].step
        expected = self.step(step)
        whole = Reader(expected, read_manifest(expected))
        return step, digest_tensors(Reader(*found.checkpoint)) == digest_tensors(whole)


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
            outcome = exam.in_save(rank, by_strace(call, number))
            if not outcome.killed:
                break
            found.append(outcome)
            _say(f"rank {rank} {call} {number}", outcome)
    return found


def random_moments(exam: Exam, count: int) -> list[Outcome]:
    """Kills anywhere in a run; those that came too late are tried again."""
    draw, found = random.Random(0), []
    while len(found) < count:
        rank, seconds = draw.randrange(exam.ranks), draw.uniform(0, exam.seconds)
        outcome = exam.in_run(rank, seconds)
        if outcome.killed:
            found.append(outcome)
            _say(f"rank {rank} after {seconds:.3f} s", outcome)
    return found


def _say(where: str, outcome: Outcome) -> None:
    said = "held" if outcome.good else "FAILED"
    left = ", ".join(outcome.left)
    print(
        f"{where}: goes on after step {outcome.step}, {said} ({left})", file=sys.stderr, flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200, help="kills in all, at least")
    parser.add_argument("--points", type=int, default=10_000, help="calls of a name at most")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--foreground", action="store_true", help="save.background: false")
    given = parser.parse_args()
    if not has_strace():
        print(NO_STRACE, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        exam = Exam.prepare(Path(folder), given.ranks, background=not given.foreground)
        calls = [o for rank in range(given.ranks) for o in every_call(exam, rank, given.points)]
        moments = random_moments(exam, max(0, given.kills - len(calls)))
    good = sum(outcome.good for outcome in (*calls, *moments))
    print(
        f"{good} of {len(calls) + len(moments)} kills resumed to the bit: {len(calls)} at system "
        f"calls of a save, {len(moments)} at random moments of a run"
    )
    return int(good < len(calls) + len(moments))


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
