"""The run directory.

job.yaml           the job with every value resolved; training it again repeats the run
environment.json   versions, machine, git revision
metrics.jsonl      one line per step and per evaluation
trace.jsonl        one line per step, to the bit (save.trace)
checkpoints/       step-000020/ ...: what training needs to go on
result/            the adapter or the model, as peft and transformers read it
answers.json       what the model said to the held-out prompts before training
report.json        what the summary shows
logs/              what the ranks printed
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtune.checkpoint.directory import remove_partial
from shardtune.config.job import Job
from shardtune.config.job_file import leaves, load_job
from shardtune.core.atomic_write import atomic_write
from shardtune.core.metrics import MetricsLine
from shardtune.core.run_report import EvalFigures, RunReport
from shardtune.core.yaml_document import dotted, dump_document
from shardtune.errors import Problem, RunError

_FILES = (
    "job.yaml",
    "environment.json",
    "metrics.jsonl",
    "trace.jsonl",
    "answers.json",
    "report.json",
)
# What a resumed run may change: none of these alters what is computed.
_FREE = {
    *(("train", key) for key in ("micro_batch", "gradient_checkpointing", "keep_layers")),
    *(("train", key) for key in ("memory_gib", "log_every", "rehearse", "offload_activations")),
    ("train", "optimizer", "paged"),
    ("data", "workers"),
}
_FOLDERS = ("checkpoints", "result", "logs")


@dataclass(frozen=True)
class RunDir:
    """Names the files of a run, and writes the small ones."""

    path: Path
    writes: bool = True
    """False on the ranks that leave the writing to another."""
    waiting: dict[Path, bytes] = field(default_factory=dict, compare=False, repr=False)
    """Lines for which there was no room on the disk."""

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        return self.path / "result"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def refuse_a_file(self, place: str) -> None:
        """A run needs a folder."""
        there = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not there.is_dir():
            fact = f"{there} is a file"
            raise RunError(Problem(place, fact, "name a folder, or one that doesn't exist yet"))

    def refuse_if_occupied(self, place: str) -> None:
        """A run is never overwritten by accident."""
        self.refuse_a_file(place)
        foreign = [name for name in _FOLDERS if (self.path / name).exists()]
        if foreign and not self.job.exists() and foreign != ["logs"]:
            fact = f"{self.path} has {', '.join(foreign)}, which no run of ours wrote"
            raise RunError(Problem(place, fact, "set save.directory to a folder of its own"))
        if self.job.exists():
            raise RunError(
                Problem(
                    place,
                    f"{self.path} holds a run already",
                    "go on with it (--resume), replace it (--overwrite), or set save.directory",
                )
            )

    def refuse_other_job(self, job: Job) -> None:
        """A run is resumed as it was begun: what changes the mathematics may not differ."""
        self.require_run()
        before = dict(leaves(load_job(self.job).job.model_dump(mode="json")))
        now = dict(leaves(job.model_dump(mode="json")))
        # Dropout draws its numbers by micro-batch.
        free = _FREE - ({("train", "micro_batch")} if now.get(("adapter", "dropout")) else set())
        problems = [
            Problem(
                dotted(key),
                f"is {now.get(key)!r}, but the run was begun with {before.get(key)!r}",
                "set it back, or begin another run in a directory of its own",
            )
            for key in sorted(before.keys() | now.keys(), key=dotted)
            if before.get(key) != now.get(key)
            and key[0] in ("model", "adapter", "data", "train")
            and key not in free
        ]
        if problems:
            raise RunError(problems)

    def refuse_other_data(self, digests: Mapping[str, str]) -> None:
        """The same names in the job don't make the same rows in the files."""
        text = (self.path / "environment.json").read_text(encoding="utf-8")
        before: dict[str, str] = json.loads(text).get("data", {})
        changed = sorted(name for name in before if before[name] != digests.get(name))
        if changed:
            fact = f"{', '.join(changed)}: the rows are others than those the run was begun with"
            fix = "put the old files back, or begin another run in a directory of its own"
            raise RunError(Problem("data", fact, fix))

    def run_id(self) -> str | None:
        """What tells this run from others in the same place; None if that can't be read."""
        try:
            text = (self.path / "environment.json").read_text(encoding="utf-8")
            return str(json.loads(text)["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def require_run_id(self) -> str:
        if (found := self.run_id()) is None:
            fact = "environment.json can't be read: whose checkpoints these are is unknown"
            raise RunError(Problem(str(self.path), fact, "put it back, or begin again"))
        return found

    def refuse_if_finished(self) -> None:
        """A run that came to its end has nothing left to do."""
        report = self.read_report()
        if report is not None and report.finished:
            fact = f"the run is finished: {report.training.step} steps, result in result/"
            fix = "replace it (--overwrite), or set save.directory for another run"
            raise RunError(Problem(str(self.path), fact, fix))

    def forget_report(self) -> None:
        """The summary of an earlier part of this run must not be taken for that of the next."""
        (self.path / "report.json").unlink(missing_ok=True)

    def read_job(self) -> Job | None:
        """The job as the run was begun; None where there is no run."""
        return load_job(self.job).job if self.job.is_file() else None

    def require_run(self) -> None:
        """Refuses a folder that no run was written to."""
        if not self.job.is_file():
            fix = "name the `save.directory` of a run"
            raise RunError(Problem(str(self.path), "is no run directory: no job.yaml in it", fix))

    def prepare(self, *, overwrite: bool) -> None:
        """Makes the folder ready for a run to write to."""
        if overwrite:
            self._clear()
        self._make()
        self.forget_report()
        for folder in (self.path, self.checkpoints):  # of a run that was killed while it wrote
            remove_partial(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuses a second run in the same place; the lock of a process that dies is gone.

        Folders that were made only to be locked are gone in the end, too.
        """
        import fcntl

        made = self._make()
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fact = "another run is writing to this folder now"
                fix = "wait for its end, or set save.directory to another"
                raise RunError(Problem(str(self.path), fact, fix)) from None
            yield
        finally:
            with suppress(OSError):  # something lies in it: it is a run's
                for folder in made:
                    folder.rmdir()
            os.close(descriptor)

    def _make(self) -> list[Path]:
        """Makes the run's folder; returns what was made, the innermost first."""
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fact = f"the folder can't be made: {error.strerror}"
            raise RunError(Problem(str(self.path), fact, "set save.directory to another")) from None
        return missing

    def _clear(self) -> None:
        """Removes what a run wrote here, if there was one, and nothing else in the folder."""
        if not self.job.exists():
            return
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def begin(self, job: Job, environment: Mapping[str, Any]) -> None:
        """Writes down what is about to run, from its first step on."""
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
            self.forget_report()  # and what else is of an attempt that came to no checkpoint
            for log in (self.metrics, self.trace):
                log.unlink(missing_ok=True)
            atomic_write(self.job, dump_document(job.model_dump(mode="json")))
            _write_json(self.path / "environment.json", environment)

    def log(self, line: MetricsLine) -> None:
        """Adds a line to the metrics; a crash loses at most the line being written."""
        if self.writes:
            self._append(self.metrics, line.to_json(ascii_only=True))

    def log_trace(self, line: Mapping[str, str | int]) -> None:
        """Adds a line to the trace."""
        if self.writes:
            self._append(self.trace, json.dumps(line))

    def sync_logs(self) -> None:
        """Puts the lines on the disk: a checkpoint must not be there without those before it.
        OSError if there is no room for them."""
        if self.writes:
            for log in (self.metrics, self.trace):
                self._flush(log)
                if log.exists():
                    with log.open("rb") as file:
                        os.fsync(file.fileno())

    def _append(self, log: Path, line: str) -> None:
        """A disk that is full, maybe only until a checkpoint is through, is no reason to lose a
        step: its line waits for the next."""
        self.waiting[log] = self.waiting.get(log, b"") + f"{line}\n".encode()
        try:
            self._flush(log)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _flush(self, log: Path) -> None:
        if log in self.waiting:
            _add_whole(log, self.waiting[log])
            del self.waiting[log]

    def forget_after(self, step: int) -> None:
        """Drops the lines of steps that a resumed run will take again, and the old report."""
        if self.writes:
            self.forget_report()
            for log in (self.metrics, self.trace):
                if log.exists():
                    kept = [record for record in _records(log) if record["step"] <= step]
                    atomic_write(log, "".join(json.dumps(record) + "\n" for record in kept))

    def evaluations(self, step: int) -> dict[str, EvalFigures]:
        """The figures of each held-out set after `step` steps."""
        return {
            record["set"]: EvalFigures(**{key: record[key] for key in EvalFigures.model_fields})
            for record in _records(self.metrics)
            if record["kind"] == "evaluation" and record["step"] == step
        }

    def write_answers(self, answers: Sequence[str]) -> None:
        """Keeps what the model said before training, for the report at the end."""
        _write_json(self.path / "answers.json", list(answers))

    def read_answers(self) -> list[str]:
        path = self.path / "answers.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def write_report(self, report: RunReport) -> None:
        atomic_write(self.path / "report.json", report.to_json(indent=2) + "\n")

    def read_report(self) -> RunReport | None:
        """The report of a run that came to its end; RunError if it isn't one of ours."""
        path = self.path / "report.json"
        if not path.exists():
            return None
        try:
            return RunReport.model_validate_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            fact = f"is damaged, or of another version of shardtune ({type(error).__name__})"
            fix = "replace the run (--overwrite), or set save.directory for another"
            raise RunError(Problem(str(path), fact, fix)) from None


def _records(log: Path) -> list[dict[str, Any]]:
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    whole, _, _ = text.rpartition("\n")  # a crash may have left a line without an end
    return [json.loads(line) for line in whole.splitlines()]


def _add_whole(log: Path, data: bytes) -> None:
    """Adds all of it or, where that fails, nothing."""
    with log.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
