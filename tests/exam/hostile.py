"""Fuzzes run directories: `python -m tests.exam.hostile --seed 1 --minutes 10 [--rounds N]`.

A round takes a real run directory (finished, killed, of an earlier version, not begun) or a folder
of somebody's, does up to three random things to it (`tests/exam/mutations.py`), and gives a random
command. What must hold, whatever was done:

- no file that isn't the run's has changed, but that a damaged folder was set aside with it;
- a command that only reads has changed nothing at all;
- no traceback, no hang beyond 60 s, and an exit code that the docs name;
- a run that can go on does, and its result is that of the run that was left alone, to the bit.

Commands run in processes that are forked from one that has imported everything, so a round takes
about a second. The launcher's rank runs in the launcher's own process there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from shardtune.checkpoint.overwrite import move_aside
from shardtune.checkpoint.run_dir import RunDir, new_marker
from shardtune.checkpoint.run_marker import MARKER_FILE, RUN_FILES, write_marker
from tests.exam.mutations import MUTATIONS, Snapshot, State, snapshot

PATIENCE = 60.0
WORKERS = 2
JOB = """\
model: {name: tiny}
adapter: {type: lora, rank: 2, alpha: 4, dropout: 0.1}
data:
  train: [{path: rows.jsonl, format: instruction}]
  sequence_length: 64
  packing: false
train: {steps: 4, global_batch: 2, micro_batch: 1, learning_rate: 1e-3, schedule: constant,
        precision: fp32, preflight: false}
evaluate: {every: 0, samples: 0}
launch: {processes: 1, threads: 1, restarts: 0}
save: {directory: run, every: 1, keep: 3, trace: true}
"""
COMMANDS: dict[str, tuple[str, ...]] = {
    "resume": ("train", "job.yaml", "--resume"),
    "train": ("train", "job.yaml"),
    "overwrite": ("train", "job.yaml", "--overwrite"),
    "verify": ("verify", "run"),
    "verify json": ("verify", "run", "--json"),
    "generate": ("generate", "run", "--prompt", "Say 1.", "--max-new-tokens", "2"),
    "merge": ("merge", "run", "merged"),
    "show": ("show", "run/job.yaml"),
}
DRAWN = ("resume",) * 6 + ("overwrite",) * 3 + ("train",) * 2 + tuple(COMMANDS)
"""Those that write come up more often."""
CODES = {"verify": {0, 1, 2}, "verify json": {0, 1, 2}}
WEIGHTS = "adapter_model.safetensors"


@dataclass
class Ended:
    """How a command ended; no code for one that was killed because it hung."""

    code: int | None
    said: str
    seconds: float


@dataclass
class Round:
    """One state and one command, and what was wrong in the end."""

    number: int
    state: str
    done: tuple[str, ...]
    command: str
    ended: Ended
    went_on: bool
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Templates:
    """Real run directories, and the digest of the result that each of them leads to."""

    path: Path
    result: str

    @staticmethod
    def make(path: Path) -> Templates:
        place = path / "place"
        lay_out(place)
        for name, until in (("finished", 5), ("other", 5), ("killed", 2)):
            ended = in_child(place, ["train", "job.yaml"], until=_after(place / "run", until))
            assert ended.code == (0 if until > 4 else None), ended.said
            shutil.move(place / "run", path / name)
        found = hashlib.sha256((path / "finished" / "result" / WEIGHTS).read_bytes()).hexdigest()
        return Templates(path, found)

    def copy(self, state: str, place: Path) -> None:
        """Lays out a place with a run in this state."""
        lay_out(place)
        run = place / "run"
        kind = state.removeprefix("legacy ")
        if kind in ("finished", "killed"):
            shutil.copytree(self.path / kind, run)
        elif kind == "being overwritten":  # by a process that was killed
            shutil.copytree(self.path / "finished", run)
            move_aside(RunDir(run))
        elif kind != "absent":
            run.mkdir()
        if state.startswith("legacy"):
            (run / MARKER_FILE).unlink()
        if kind == "not begun":
            shutil.copy(self.path / "killed" / "forecast.json", run)
            shutil.copytree(self.path / "killed" / "logs", run / "logs")
            write_marker(run, new_marker())
        if kind == "somebody's":
            for name in ("report.json", "metrics.jsonl", ".x.partial", "job.yaml", "result/thesis"):
                (run / name).parent.mkdir(exist_ok=True)
                (run / name).write_text(f"mine: {name}\n", "utf-8")


STATES = ("finished", "killed", "legacy finished", "legacy killed", "finished", "killed",
          "being overwritten", "not begun", "somebody's", "absent")  # fmt: skip


def lay_out(place: Path) -> None:
    """A job and its data, and something that belongs to a person."""
    place.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(12)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (place / "job.yaml").write_text(JOB, "utf-8")
    (place / "users").mkdir(exist_ok=True)
    (place / "users" / "thesis.txt").write_text("years of work\n", "utf-8")


def _after(run: Path, steps: int) -> Callable[[], bool]:
    """True when the run has a checkpoint of so many steps."""
    return lambda: (run / "checkpoints" / f"step-{steps:06d}").exists()


def play(seed: int, number: int, templates: Templates, place: Path) -> Round:
    """One round, which only its seed and number decide."""
    draw = random.Random(f"{seed}/{number}")
    state = draw.choice(STATES)
    templates.copy(state, place)
    run = place / "run"
    about = State(place, run, templates.path / "other")
    if state == "somebody's":
        about.foreign |= {path for path in run.rglob("*") if path.is_file()}
    names = []
    if run.is_dir():
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            mutation = draw.choice(MUTATIONS)
            if (told := mutation(draw, about)) is not None:
                names.append(f"{mutation.__name__} {told}")
    command = draw.choice(DRAWN)
    before = snapshot(place)
    can = command == "resume" and can_go_on(run, templates.path / state.split()[-1], state)
    ended = in_child(place, COMMANDS[command])
    found = Round(number, state, tuple(names), command, ended, can and ended.code == 0)
    judge(found, about, before, templates, can=can)
    return found


def can_go_on(run: Path, template: Path, state: str) -> bool:
    """Whether what is left of a run is enough to go on with: its job, its identity, and a good
    checkpoint, with nothing odd in the place of what will be written."""
    if state.split()[-1] not in ("finished", "killed"):
        return False
    now, was = snapshot(run), snapshot(template)

    def same(name: str) -> bool:
        return now.get(name) == was[name]

    small = (MARKER_FILE, *RUN_FILES)
    odd = [name for name in small if name in now and now[name][0] != "file"]
    folders = [name for name in ("checkpoints", "result", "logs") if name in now]
    odd += [name for name in folders if now[name][0] != "folder"]
    known = same(MARKER_FILE) or (same("environment.json") and MARKER_FILE not in now)
    if odd or not same("job.yaml") or not known or "checkpoints" not in now:
        return False
    whole = [name for name in was if name.startswith("checkpoints/step-") and name.count("/") == 1]
    good = [
        name for name in whole
        if {k: v for k, v in now.items() if k.startswith(f"{name}/")}
        == {k: v for k, v in was.items() if k.startswith(f"{name}/")}
    ]  # fmt: skip
    # What is changed in a report may leave it one that can be read: then the run is finished.
    reported = "report.json" in was and "report.json" in now
    intact = all(same(name) for name in was if name.split("/")[0] == "result")
    return bool(good) and not (reported and intact)


def judge(found: Round, about: State, before: Snapshot, templates: Templates, *, can: bool) -> None:
    """Adds what was broken."""
    ended, broken = found.ended, found.broken
    if ended.code is None:
        broken.append(f"hung for {ended.seconds:.0f} s")
    elif ended.code not in CODES.get(found.command, {0, 2}):
        broken.append(f"exit code {ended.code}")
    if "Traceback (most recent call last)" in ended.said:
        broken.append("a traceback")
    after = snapshot(about.place)
    broken += [f"{name} is changed" for name in about.changed(before, after)]
    if found.command not in ("resume", "train", "overwrite"):
        broken += [
            f"{name} is changed by a command that reads"
            for name in sorted(before.keys() | after.keys())
            if not name.startswith("merged") and before.get(name) != after.get(name)
        ]
    elif ended.code == 0:
        weights = about.run / "result" / WEIGHTS
        there = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else ""
        if there != templates.result:
            broken.append("the result is another than that of the run that was left alone")
    if can and ended.code != 0:
        broken.append("a run that can go on does not")
    if found.command == "overwrite" and ended.code not in (0, None):
        kept = {name for name in before if name.startswith("run/checkpoints/")}
        broken += [f"{name} is lost by a failed overwrite" for name in sorted(kept - after.keys())]


# Processes ---------------------------------------------------------------------------------------


def in_child(
    place: Path, words: Sequence[str], *, until: Callable[[], bool] = lambda: False
) -> Ended:
    """A command of shardtune in a forked process, killed when `until` is true or when it hangs."""
    output, begun = place / "said.txt", time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = _be_command(place, output, words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    killed = False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if until() or time.monotonic() - begun > PATIENCE:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            killed = True
            break
        time.sleep(0.005)
    said = output.read_text("utf-8", errors="replace")
    output.unlink()
    code = None if killed else os.waitstatus_to_exitcode(status)
    return Ended(code, said, time.monotonic() - begun)


def _be_command(place: Path, output: Path, words: Sequence[str]) -> int:
    os.setsid()
    os.chdir(place)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    from shardtune.cli.main import main
    from shardtune.launch import LAUNCHER_PID, supervisor
    from shardtune.launch.restart_policy import past_attempts

    def here(command: Sequence[str], *, logs: Path, **_: Any) -> int:
        """In the place of `run_local`: the only rank runs in this process."""
        (logs / f"attempt-{past_attempts(logs)}").mkdir(parents=True)
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(rank | {LAUNCHER_PID: str(os.getppid())})
        return main(list(command[2:]))

    supervisor.run_local = here  # type: ignore[assignment]
    return main(list(words))


def warm_up() -> None:
    """Imports what commands import, before any is forked."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("SHARDTUNE_FAST_PRECISIONS", "fp32")
    import torch

    import tests.preloaded  # noqa: F401

    torch.set_num_threads(1)


def work(worker: int, arguments: argparse.Namespace, templates: Templates, results: Path) -> None:
    """Every so-manieth round, until the time is up."""
    deadline = time.monotonic() + 60 * arguments.minutes
    with results.open("a", encoding="utf-8") as file:
        for number in count(arguments.first + worker, arguments.workers):
            if number >= arguments.first + arguments.rounds or time.monotonic() > deadline:
                return
            place = templates.path / f"round-{number}"
            found = play(arguments.seed, number, templates, place)
            told = {
                "number": number, "state": found.state, "done": found.done,
                "command": found.command, "code": found.ended.code,
                "seconds": found.ended.seconds, "went_on": found.went_on,
                "broken": found.broken, "said": found.ended.said[-2000:] if found.broken else "",
            }  # fmt: skip
            file.write(json.dumps(told) + "\n")
            file.flush()
            shutil.rmtree(place)


def fuzz(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All rounds, by several workers; what each came to."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    warm_up()
    templates = Templates.make(folder)
    results = folder / "results.jsonl"
    workers = []
    for worker in range(arguments.workers):
        if (pid := os.fork()) == 0:
            try:
                work(worker, arguments, templates, results)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        workers.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
    assert not any(codes), "a worker of the fuzzer itself failed"
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzzes run directories.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=10**6, help="at most so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--workers", type=int, default=WORKERS)
    return parser.parse_args(words)


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(arguments, Path(folder))
    broken = [each for each in found if each["broken"]]
    for each in broken:
        print(json.dumps(each, indent=1))
    went_on = sum(each["went_on"] for each in found)
    slowest = max((each["seconds"] for each in found), default=0.0)
    print(
        f"{len(found)} rounds, {went_on} runs went on to the bit, the slowest command took "
        f"{slowest:.1f} s, {len(broken)} rounds with a broken invariant"
    )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
