"""Real runs of `shardtune train`, with faults, for the exam to look at.

The model has 2 layers and reads bytes; 512 rows of very different length; fp32, AdamW, dropout on,
global batch 12 in micro-batches of one row, a checkpoint and a line of trace at every step.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from tests.exam.faults import Fault, Plan

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"
TIMEOUT = 1500
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
launch: {processes: 4, threads: 1, restarts: 0}
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
    ) -> Done:
        """A run to its end, whatever that is, and a look at what it left behind."""
        process, plan = self.start(name, *changes, faults=faults, env=env or {})
        family: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + TIMEOUT
        while process.poll() is None and time.monotonic() < deadline:
            family |= {each.pid: each for each in descendants(process.pid)}
            time.sleep(0.1)
        ended = time.time()
        process.kill()
        _, alive = psutil.wait_procs(list(family.values()), timeout=1)
        for each in alive:
            each.kill()
        out, error = process.communicate()
        left = [each.pid for each in alive]
        return Done(process.returncode, out, error, ended, left, self.path / name, plan)

    @cached_property
    def whole(self) -> Done:
        """The run without a fault, with whose trace the others are compared."""
        return self.run("whole")

    @cached_property
    def whole_on_two(self) -> Done:
        """The same on two ranks, which draw other numbers for dropout."""
        return self.run("whole-on-two", "launch.processes=2")

    @cached_property
    def kept(self) -> Done:
        """The same again, with a checkpoint of every step."""
        return self.run("kept", "save.keep=24")


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
