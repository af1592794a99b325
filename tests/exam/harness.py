"""Real runs of `shardtune train`, with faults, for the exam to look at.

The model has 2 layers and reads bytes; 512 rows of very different length; fp32, AdamW, dropout on,
global batch 12 in micro-batches of one row, two ranks, a checkpoint and a line of trace at every
step. To start a process takes longer than all its steps, so that runs are shared where they can be.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.exam.faults import Fault, Plan
from tests.exam.slots import Slots, at, has_ended

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"
TIMEOUT = 1500
FOUR = ("launch.processes=4",)
SHORT = ("launch.processes=1", "train.steps=6", "save.keep=2")
FAILED_WRITES = {
    7: errno.ENOSPC, 10: errno.EIO, 13: errno.EROFS, 16: errno.EDQUOT, 19: errno.EMFILE,
}  # fmt: skip
"""The errors of `struck_on_four`, by step; long after its restarts, which save a step again."""
JOB = """\
model: {name: tiny}
adapter: {type: lora, rank: 4, alpha: 8, dropout: 0.1}
data:
  train: [{path: rows.jsonl, format: instruction}]
  eval: [{name: held, path: held.jsonl, format: instruction}]
  sequence_length: 256
  packing: false
train:
  steps: 24
  global_batch: 12
  micro_batch: 1
  learning_rate: 1e-3
  schedule: constant
  precision: fp32
evaluate: {every: 0, samples: 0}
launch: {processes: 2, threads: 1, restarts: 0}
save: {directory: run, every: 1, trace: true}
"""


@dataclass(frozen=True)
class Done:
    """How a run ended. `left` are processes of it that outlived it by more than a second."""

    code: int
    out: str
    error: str
    ended: float
    left: list[int]
    folder: Path
    plan: Plan

    @property
    def trace(self) -> str:
        path = self.folder / "trace.jsonl"
        return path.read_text("utf-8") if path.exists() else ""

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Lines of the metrics."""
        return _lines(self.folder / "metrics.jsonl", kind)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the launcher wrote down."""
        return _lines(self.folder / "logs" / "events.jsonl", kind)

    def after_fault(self, index: int, event: dict[str, Any]) -> float:
        """Seconds from a fault to an event."""
        struck = self.plan.struck(index)
        return float("inf") if struck is None else event["time"] - struck


def _lines(path: Path, kind: str) -> list[dict[str, Any]]:
    text = path.read_text("utf-8") if path.exists() else ""
    return [found for line in text.splitlines() if (found := json.loads(line))["kind"] == kind]


@dataclass
class Lab:
    """A folder with a job and its data, in which runs are made."""

    path: Path
    slots: Slots = field(default_factory=Slots)
    _shared: dict[str, Done] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def prepare(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        draw = random.Random(6)

        def rows(count: int) -> str:
            found = []
            for number in range(count):
                words = " ".join(str(draw.randrange(1000)) for _ in range(draw.randrange(1, 30)))
                found.append({"instruction": f"Say {number}, {words}.", "output": f"It is {words}"})
            return "\n".join(map(json.dumps, found))

        (self.path / "rows.jsonl").write_text(rows(512), "utf-8")
        (self.path / "held.jsonl").write_text(rows(8).replace("Say", "Tell"), "utf-8")
        (self.path / "job.yaml").write_text(JOB, "utf-8")

    def environment(self, plan: Plan | None = None) -> dict[str, str]:
        """Nothing of ours but what a run needs, and the faults it is to suffer."""
        kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
        found = {name: os.environ[name] for name in kept if name in os.environ}
        found |= {
            "XDG_CACHE_HOME": str(self.path / "cache"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        if plan is not None:
            found |= {"EXAM_FAULTS": str(plan.path), "PYTHONPATH": f"{INJECT}:{ROOT}"}
        return found

    def start(
        self, name: str, *changes: str, faults: Sequence[Fault] = (), **settings: Any
    ) -> tuple[subprocess.Popen[str], Plan]:
        # A run that is resumed with the same faults doesn't suffer them twice.
        stem = f"{name.replace('/', '-')}-{hash(tuple(faults)):x}"
        plan = Plan(self.path / f"{stem}.faults", list(faults))
        plan.write()
        command = ["-m", "shardtune", "train", "job.yaml", f"save.directory={name}", *changes]
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.path,
            env=self.environment(plan) | settings.pop("env", {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **settings,
        )
        return process, plan

    def run(
        self,
        name: str,
        *changes: str,
        faults: Sequence[Fault] = (),
        env: dict[str, str] | None = None,
        lines: int = 0,
    ) -> Done:
        """A run to its end, whatever that is, and a look at what it left behind. With `lines` its
        reader goes away after so many."""
        with self.slots.taken():
            process, plan = self.start(name, *changes, faults=faults, env=env or {})
            assert process.stdout is not None
            read = [process.stdout.readline() for _ in range(lines)]
            if lines:
                process.stdout.close()
            return self._follow(process, plan, name, "".join(read))

    def _follow(self, process: subprocess.Popen[str], plan: Plan, name: str, read: str) -> Done:
        family: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + TIMEOUT
        looks = 0
        while not has_ended(process) and time.monotonic() < deadline:
            if looks % 3 == 0:  # reads all of /proc
                family |= {each.pid: each for each in descendants(process.pid)}
            looks += 1
            time.sleep(0.1)
        ended = time.time()
        self.slots.charge(process)
        process.kill()
        _, alive = psutil.wait_procs(list(family.values()), timeout=1)
        for each in alive:
            each.kill()
        out, error = process.communicate()
        left = [each.pid for each in alive]
        return Done(process.returncode, read + out, error, ended, left, self.path / name, plan)

    def shared(
        self, name: str, *changes: str, faults: Sequence[Fault] = (), lines: int = 0
    ) -> Done:
        """A run that several cases look at; who comes first makes it, and the others wait."""
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._shared:
                with at(name):
                    self._shared[name] = self.run(name, *changes, faults=faults, lines=lines)
            return self._shared[name]

    def command(self, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """A command of shardtune beside a run: its exit code, and what it said."""
        with self.slots.taken():
            process = subprocess.Popen(
                [sys.executable, "-m", "shardtune", *words],
                cwd=self.path,
                env=self.environment() | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert process.stdout is not None
            said = process.stdout.read()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self.slots.charge(process)
            return process.wait(), said

    @property
    def whole(self) -> Done:
        """The run without a fault, with whose trace the others are compared."""
        return self.shared("whole")

    @property
    def whole_on_four(self) -> Done:
        """The same on four ranks, which draw other numbers for dropout."""
        return self.shared("whole-on-four", *FOUR)

    @property
    def kept(self) -> Done:
        """The run without a fault again, with a checkpoint of every step, and `| head -13`."""
        return self.shared("kept", "save.keep=24", lines=13)

    @property
    def short(self) -> Done:
        """Six steps of one process."""
        return self.shared("short", *SHORT)

    @property
    def struck_on_four(self) -> Done:
        """Four ranks: one is killed, the weights of one are spoilt, then one after the other can't
        write its part of a checkpoint."""
        faults = [Fault("kill", 3, 2, "backward"), Fault("spoil weight", 2, 4, "data")]
        faults += [
            Fault("fail write", number % 4, step, "save", value=code)
            for number, (step, code) in enumerate(FAILED_WRITES.items())
        ]
        changes = (*FOUR, "launch.restarts=2", "save.keep=24")
        return self.shared("struck-on-four", *changes, faults=faults)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
