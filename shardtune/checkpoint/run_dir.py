"""The run directory.

run.json           the marker: which run this is, and which names here are its own
job.yaml           the job with every value resolved; training it again repeats the run
forecast.json      what was predicted for it
environment.json   versions, machine, git revision
metrics.jsonl      one line per step and per evaluation
trace.jsonl        one line per step, to the bit (save.trace)
checkpoints/       step-000020/ ...: what training needs to go on
result/            the adapter or the model, as peft and transformers read it
answers.json       what the model said to the held-out prompts before training
data.json          what it trains on: figures of each data set, and a few documents
report.json        what the summary shows
report.html        all of it as a page
logs/              what the ranks printed
track/             what trackers were sent, and the files of those that write files
profile/           what torch's profiler saw of a few steps (train --profile)
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardtune.checkpoint.commit_by_rename import remove_partial
from shardtune.checkpoint.run_logs import RunLogs
from shardtune.checkpoint.run_marker import (
    MARKER_FILE,
    PROFILED,
    RUN_FILES,
    RunMarker,
    read_marker,
    read_small,
    recognise_run,
    write_marker,
)
from shardtune.config.job import Job
from shardtune.config.job_file import LoadedJob, load_job
from shardtune.core.files.atomic_write import atomic_write, restore_replaced
from shardtune.core.files.yaml_document import dump_document
from shardtune.core.runs.data_summary import DataSummary
from shardtune.core.runs.run_environment import RunEnvironment
from shardtune.core.runs.run_report import RunReport
from shardtune.errors import Problem, RunError
from shardtune.plan.run_forecast import RunForecast

_LEFTOVER = re.compile(
    rf"\.({'|'.join(map(re.escape, (MARKER_FILE, *RUN_FILES)))})\.partial"
    r"|\.result\.[0-9a-f]{8}(\.old)?\.partial"
)
"""What a run that was killed while it wrote leaves beside its files: see `atomic_write`."""


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

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    def marker(self) -> RunMarker | None:
        """What the folder says of itself; None if it isn't ours. A run of an earlier version, which
        has no marker, is known by its other files."""
        return read_marker(self.path) or recognise_run(self.path)

    def run_id(self) -> str | None:
        """What tells this run from others in the same place; None if that can't be read."""
        marker = self.marker()
        return None if marker is None else marker.run

    def own(self, name: str) -> None:
        """Takes a name for ours that the run's marker, of an earlier version, doesn't have.
        RunError if something lies there."""
        marker, path = self.marker(), self.path / name
        if marker is not None and name not in marker.names:
            if path.exists():
                raise RunError(Problem(str(path), "is not the run's", "move it elsewhere"))
            write_marker(self.path, replace(marker, names=(*marker.names, name)))

    def mark_saved(self) -> None:
        """Notes that there is a checkpoint: from now on one has to be found."""
        marker = self.marker()
        if self.writes and marker is not None and not marker.saved:
            write_marker(self.path, replace(marker, saved=True))

    def forget_report(self) -> None:
        """The summary of an earlier part of this run must not be taken for that of the next."""
        (self.path / "report.json").unlink(missing_ok=True)

    def owns(self, name: str) -> bool:
        """Whether the run may write a file of this name: it is in the marker's list. An earlier
        version has a shorter one, and what lies there under another name is a person's."""
        marker = self.marker()
        return marker is not None and marker.begun and name in marker.names

    def read_job(self) -> Job | None:
        """The job as the run was begun; None where there is no run."""
        if not self.job.is_file():
            return None
        loaded = load_job(self.job)
        return with_control_tokens(loaded.job) if _lacks_control_tokens(loaded) else loaded.job

    def lacks_control_tokens(self) -> bool:
        """Whether the run is of a version that had no `data.control_tokens`: it took all of them as
        tokens, and goes on so."""
        return self.job.is_file() and _lacks_control_tokens(load_job(self.job))

    def claim(self) -> None:
        """Makes the folder ours before anything else is written to it; RunError if it holds what
        no run of ours wrote."""
        self._make()
        if read_marker(self.path) is None:
            found = recognise_run(self.path)
            if found is None and (foreign := self.foreign_names()):
                raise RunError(Problem(str(self.path), holds(foreign), OWN_FOLDER))
            write_marker(self.path, found or new_marker())

    def foreign_names(self) -> list[str]:
        """What lies in a folder that isn't ours, but for what a killed write of ours left."""
        if not self.path.is_dir():
            return []
        names = sorted(path.name for path in self.path.iterdir())
        return [name for name in names if name != f".{MARKER_FILE}.partial"]

    def prepare(self) -> None:
        """Makes the folder ready for a run to write to."""
        self.claim()
        self.forget_report()
        remove_partial(self.checkpoints)  # of a run that was killed while it wrote
        restore_replaced(self.result)  # if it was killed between the two renames
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                remove_tree(path)

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

    def begin(self, job: Job, environment: RunEnvironment) -> None:
        """Writes down what is about to run, from its first step on."""
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
            marker = RunMarker(environment.run, self._free_names(), data=environment.data)
            write_marker(self.path, marker)
            self.forget_report()  # and what else is of an attempt that came to no checkpoint
            for name in {"report.html", "data.json"}.intersection(marker.names):
                (self.path / name).unlink(missing_ok=True)
            self.jsonl.clear()
            atomic_write(self.job, dump_document(job.model_dump(mode="json")))
            atomic_write(self.path / "environment.json", environment.to_json(indent=2) + "\n")
            write_marker(self.path, replace(marker, begun=True))

    def _free_names(self) -> tuple[str, ...]:
        """The names that a run takes, but for those under which a person's files lie: an earlier
        version had fewer."""
        before = self.marker()
        return tuple(
            name
            for name in RunMarker.names
            if before is None or name in before.names or not (self.path / name).exists()
        )

    def own_profile(self) -> Path:
        """The folder for a profile that is about to be taken, without what an earlier one left."""
        if self.writes:
            self.own("profile")
            if self.profile.is_dir():
                for path in self.profile.iterdir():
                    if PROFILED.fullmatch(path.name):
                        path.unlink()
        return self.profile

    def extend(self, begun: Job, job: Job) -> None:
        """Writes down that the run has another length, or more patience, than it was begun with."""
        now = job.train
        length = {
            "steps": now.steps,
            "epochs": now.epochs,
            "earlier_ends": now.earlier_ends,
            "schedule_start": now.schedule_start,
            "warmup_steps": now.warmup_steps,
            "warmup_ratio": now.warmup_ratio,
            "early_stop": now.early_stop,
        }
        train = begun.train.model_copy(update=length)
        changed = begun.model_copy(update={"train": train})
        if self.writes:
            document = changed.model_dump(mode="json")
            if self.lacks_control_tokens():
                del document["data"]["control_tokens"]
            atomic_write(self.job, dump_document(document))

    def forget_after(self, step: int) -> None:
        """Drops the lines of steps that a resumed run will take again, and the old report."""
        if self.writes:
            self.forget_report()
            self.jsonl.forget_after(step)

    def note_resume(self, step: int, text: str) -> None:
        """Tells where the run went on, beside what the launcher saw: its page draws both."""
        if self.writes:
            event = {"kind": "resume", "time": time.time(), "step": step, "text": text}
            with suppress(OSError):  # a full disk must not end a run that could go on
                self.logs.mkdir(parents=True, exist_ok=True)
                with (self.logs / "events.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(event) + "\n")

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
            text = read_small(self.path / "forecast.json")
            return RunForecast.model_validate_json(text)
        except (OSError, ValueError):
            return None

    def write_answers(self, answers: Sequence[str]) -> None:
        """Keeps what the model said before training, for the report at the end."""
        _write_json(self.path / "answers.json", list(answers))

    def read_answers(self) -> list[str]:
        """They are for a person to compare: those of a damaged file are only missed."""
        try:
            found = json.loads(read_small(self.path / "answers.json"))
        except (OSError, ValueError, RecursionError):
            return []
        return [str(each) for each in found] if isinstance(found, list) else []

    def write_data(self, data: DataSummary) -> None:
        """Keeps what it trains on, for the report."""
        atomic_write(self.path / "data.json", data.to_json() + "\n")

    def write_report(self, report: RunReport) -> None:
        atomic_write(self.path / "report.json", report.to_json(indent=2) + "\n")

    def read_report(self) -> RunReport | None:
        """The report of a run that came to its end; None if there is none that can be read."""
        try:
            text = read_small(self.path / "report.json")
            return RunReport.model_validate_json(text)
        except (OSError, ValueError):
            return None


def with_control_tokens(job: Job) -> Job:
    """The job as it was before `data.control_tokens`."""
    data = job.data.model_copy(update={"control_tokens": "token"})
    return job.model_copy(update={"data": data})


def _lacks_control_tokens(loaded: LoadedJob) -> bool:
    return ("data", "control_tokens") not in loaded.origins


def new_marker() -> RunMarker:
    """The marker of a run that is about to begin."""
    return RunMarker(secrets.token_hex(8))


def holds(names: Sequence[str]) -> str:
    """The fact that a folder has something else in it."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"holds {', '.join(names[:3])}{more}, which no run of ours wrote"


OWN_FOLDER = "set save.directory to a folder that is empty or doesn't exist yet"


def remove_tree(path: Path) -> None:
    """Removes a file, or a folder with all that is in it; a link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
