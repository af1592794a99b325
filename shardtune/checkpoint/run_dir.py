"""The run directory.

job.yaml           the job with every value resolved; training it again repeats the run
forecast.json      what was predicted for it
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

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardtune.checkpoint.commit_by_rename import remove_partial
from shardtune.checkpoint.run_logs import RunLogs
from shardtune.config.job import Job
from shardtune.config.job_file import load_job
from shardtune.core.atomic_write import atomic_write
from shardtune.core.run_environment import RunEnvironment
from shardtune.core.run_report import RunReport
from shardtune.core.yaml_document import dump_document
from shardtune.errors import Problem, RunError
from shardtune.plan.run_forecast import RunForecast

_FILES = (
    "job.yaml",
    "forecast.json",
    "environment.json",
    "metrics.jsonl",
    "trace.jsonl",
    "answers.json",
    "report.json",
)
RUN_FOLDERS = ("checkpoints", "result", "logs")


@dataclass(frozen=True)
class RunDir:
    """Names the files of a run, and writes the small ones."""

    path: Path
    writes: bool = True
    """False on the ranks that leave the writing to another."""

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.jsonl"

    @cached_property
    def jsonl(self) -> RunLogs:
        """The metrics and the trace, line by line."""
        return RunLogs(self.metrics, self.trace, self.writes)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        return self.path / "result"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def run_id(self) -> str | None:
        """What tells this run from others in the same place; None if that can't be read."""
        try:
            text = (self.path / "environment.json").read_text(encoding="utf-8")
            return str(json.loads(text)["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget_report(self) -> None:
        """The summary of an earlier part of this run must not be taken for that of the next."""
        (self.path / "report.json").unlink(missing_ok=True)

    def read_job(self) -> Job | None:
        """The job as the run was begun; None where there is no run."""
        return load_job(self.job).job if self.job.is_file() else None

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
        for name in RUN_FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def begin(self, job: Job, environment: RunEnvironment) -> None:
        """Writes down what is about to run, from its first step on."""
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
            self.forget_report()  # and what else is of an attempt that came to no checkpoint
            self.jsonl.clear()
            atomic_write(self.job, dump_document(job.model_dump(mode="json")))
            atomic_write(self.path / "environment.json", environment.to_json(indent=2) + "\n")

    def extend(self, begun: Job, job: Job) -> None:
        """Writes down that the run has another length than it was begun with."""
        now = job.train
        length = {
            "steps": now.steps,
            "epochs": now.epochs,
            "earlier_ends": now.earlier_ends,
            "schedule_start": now.schedule_start,
            "warmup_steps": now.warmup_steps,
            "warmup_ratio": now.warmup_ratio,
        }
        train = begun.train.model_copy(update=length)
        changed = begun.model_copy(update={"train": train})
        if self.writes:
            atomic_write(self.job, dump_document(changed.model_dump(mode="json")))

    def forget_after(self, step: int) -> None:
        """Drops the lines of steps that a resumed run will take again, and the old report."""
        if self.writes:
            self.forget_report()
            self.jsonl.forget_after(step)

    def write_forecast(self, predicted: RunForecast | None) -> None:
        """Keeps what was predicted, in the place of what was for an earlier part of the run."""
        path = self.path / "forecast.json"
        if self.writes and predicted is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            atomic_write(path, predicted.to_json(indent=2) + "\n")
        elif self.writes:
            path.unlink(missing_ok=True)

    def read_forecast(self) -> RunForecast | None:
        """What was predicted; None where nothing was, or by another version."""
        try:
            text = (self.path / "forecast.json").read_text(encoding="utf-8")
            return RunForecast.model_validate_json(text)
        except (OSError, ValueError):
            return None

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


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
