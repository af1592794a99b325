"""Starts the processes of a run's trackers, watches them, and ends them with the run.

Whoever starts the ranks, or rank 0 itself, does this. A tracker that fails, hangs or fills the disk
costs the run one line on the screen, and `finish_seconds` at its end.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.config.trackers import tracker_labels
from shardtune.core.tracker import TrackerBase
from shardtune.track.sink import ConfigValue
from shardtune.track.tracker_process import FAILED, Order, step_forward
from shardtune.track.tracker_state import TRACK_FOLDER, state_file

WATCH_SECONDS = 0.5  # between two looks at the processes and their folders
HURRIED_SECONDS = 2.0  # to finish, when a cluster wants its machine back
SLOW_SECONDS = 1.0  # after which a person is told what the end waits for
KILL_SECONDS = 5.0  # in which the kernel has to have ended a killed process
LEAST_FREE = 1 << 30  # bytes of disk that are left to the run, or a tenth of what was free
_TAIL = 1 << 14  # bytes of a log in which its last line is looked for

Say = Callable[[str], None]


@dataclass
class _Watched:
    """The process of one tracker."""

    section: TrackerBase
    label: str
    run_dir: Path
    process: subprocess.Popen[bytes]
    told: bool = False
    """Whether a person was told that it is gone."""

    @property
    def folder(self) -> Path:
        return self.run_dir / TRACK_FOLDER / self.label

    @property
    def log(self) -> Path:
        return self.run_dir / TRACK_FOLDER / f"{self.label}.log"

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end_input(self) -> None:
        """Tells it that the run has ended. It may take a core for that now."""
        assert self.process.stdin is not None
        step_forward(self.process.pid)
        with suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        """With whatever it has started in its session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it waits for a disk that doesn't answer
            self.process.wait(timeout=KILL_SECONDS)

    def reason(self) -> str:
        """Why it ended."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        told = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
        if told:
            return told[-1][:300]
        code = self.process.returncode
        return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


@dataclass
class Trackers:
    """The trackers of a run: a context manager around it. Nothing in here raises."""

    sections: Sequence[TrackerBase]
    config: Mapping[str, ConfigValue]
    """The values of the job by their dotted path."""
    run_dir: Path
    run: str
    """The run's id."""
    say: Say
    hurried: bool = False
    """Whether the run was asked to leave: its end can't wait."""
    _watched: list[_Watched] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None
    _enough: int = 0
    """Bytes of disk that are left to the run."""

    def __enter__(self) -> Trackers:
        for section, label in zip(self.sections, tracker_labels(self.sections), strict=True):
            order = Order(
                run_dir=str(self.run_dir.absolute()),
                run=self.run,
                label=label,
                section=section.model_dump(mode="json"),
                config=dict(self.config),
                parent=os.getpid(),
            )
            try:
                watched = _Watched(section, label, self.run_dir, _start(order))
            except OSError as error:
                self._tell(label, f"can't be started: {error.strerror}")
                continue
            self._watched.append(watched)
        self._enough = min(LEAST_FREE, _free(self.run_dir) // 10)
        if self._watched:
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="trackers")
            self._watcher.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.hurried |= raised[0] is not None  # other ranks wait to hear of it
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(timeout=KILL_SECONDS)
        try:
            for each in self._watched:
                each.end_input()
            self._wait_for_last()
        finally:
            for each in self._watched:
                if each.is_alive():
                    each.kill()

    def _watch(self) -> None:
        """A thread: it holds no lock and takes microseconds at each look."""
        while not self._ended.wait(WATCH_SECONDS):
            for each in self._watched:
                if each.is_alive():
                    self._check_disk(each)
                self._check_exit(each)

    def _check_exit(self, each: _Watched) -> None:
        """Before the run's end, any exit is too early."""
        early = not self._ended.is_set()
        if not each.told and not each.is_alive() and (early or each.process.returncode):
            each.told = True
            self._tell(each.label, each.reason())

    def _check_disk(self, each: _Watched) -> None:
        limit = each.section.disk_mib << 20
        if size_of_tree(each.folder) > limit:
            each.told = True
            each.kill()
            shutil.rmtree(each.folder, ignore_errors=True)  # it can be written again
            state_file(self.run_dir, each.label).unlink(missing_ok=True)
            fact = f"it wrote more than {each.section.disk_mib} MiB (disk_mib); removed"
            self._tell(each.label, fact)
        elif _free(self.run_dir) < self._enough:
            each.told = True
            each.kill()
            fact = f"less than {self._enough >> 20} MiB of disk are left for the run"
            self._tell(each.label, fact)

    def _wait_for_last(self) -> None:
        begin, looked, waited_for = time.monotonic(), 0.0, ""
        while alive := [each for each in self._watched if each.is_alive()]:
            waited = time.monotonic() - begin
            if waited - looked > WATCH_SECONDS:  # with a core of its own it writes faster
                looked = waited
                for each in alive:
                    self._check_disk(each)
                continue
            late = [each for each in alive if waited > self._patience(each.section)]
            for each in late:
                each.told = True
                each.kill()
                self._tell(each.label, f"it didn't finish in {self._patience(each.section):g} s")
            if not waited_for and not self.hurried and waited > SLOW_SECONDS:
                waited_for = ", ".join(each.label for each in alive)
                longest = max(each.section.finish_seconds for each in alive)
                self.say(f"waiting for {waited_for} (at most {longest:g} s)")
            time.sleep(0.02)
        for each in self._watched:
            self._check_exit(each)

    def _patience(self, section: TrackerBase) -> float:
        return min(section.finish_seconds, HURRIED_SECONDS if self.hurried else float("inf"))

    def _tell(self, label: str, fact: str) -> None:
        run = shlex.quote(str(self.run_dir))
        later = f"`shardtune track {run} --to {label}` sends the rest later"
        with suppress(OSError):
            self.say(f"track: {label} stopped: {fact}; the run goes on, and {later}")


def _start(order: Order) -> subprocess.Popen[bytes]:
    (Path(order.run_dir) / TRACK_FOLDER).mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune.track.tracker_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(OSError):  # it is gone already, which is told later
        process.stdin.write(order.to_line())
        process.stdin.flush()
    return process


def size_of_tree(folder: Path) -> int:
    """Bytes of all files in a folder, which others write to meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - in a hurry
    return total


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
