"""The history of a run, read from its directory: what reports, trackers and dashboards draw.

Nothing here is written, and nothing that lies in the folder can raise: a run may be training, may
have been killed within a line, or may be of another version. What can't be read is left out and
counted. No torch, so that a laptop can look at the runs of a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from shardtune.core.runs.data_summary import DataSummary
from shardtune.core.runs.metrics import (
    CurveWarning,
    EvaluationMetrics,
    LossSpike,
    NonfiniteGradient,
    StepMetrics,
    TaskMetrics,
)
from shardtune.core.runs.metrics_log import LogPosition, NewLines, follow, read_tail
from shardtune.core.record import Record
from shardtune.core.files.regular_file import read_regular
from shardtune.core.runs.run_environment import RunEnvironment
from shardtune.core.runs.run_report import RunReport
from shardtune.core.runs.run_state import RunState, find_state
from shardtune.core.runs.thinning import thin_indices
from shardtune.core.files.yaml_leaves import Scalar, yaml_leaves

_LARGEST = 1 << 24  # bytes of one of the small files

JobValues = Mapping[str, Scalar]
"""The values of a job by their dotted path (`data.train.0.path`)."""

Warned = LossSpike | NonfiniteGradient | CurveWarning
_Point = TypeVar("_Point")
_Kind = TypeVar("_Kind", bound=Record)
_Scored = TypeVar("_Scored", EvaluationMetrics, TaskMetrics)


class LauncherEvent(Record):
    """A line of `logs/events.jsonl`: what the launcher saw of its ranks, and where the run was
    resumed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["restart", "failed", "slow", "resume"]
    time: Annotated[float, Field(ge=0, lt=253_402_300_800)]
    """Seconds since the epoch; a calendar ends with the year 9999."""
    rank: int | None = None
    step: int | None = None
    cause: str = ""
    text: str = ""
    phase: str = ""
    """Of a slow rank: in what it is slow."""
    seconds: float | None = None
    """A step of the slow rank."""
    others: float | None = None
    """A step of the others."""


class StepForecast(Record):
    """What `forecast.json` says of a step; None where it doesn't say."""

    tokens_per_second: float | None = None
    step_seconds: float | None = None
    peak_gib: float | None = None
    """All that is in use on the fullest GPU."""
    allocated_gib: float | None = None
    """The peak of what is allocated there."""
    parts: Mapping[str, float] = Field(default_factory=dict)
    """Seconds of a step by what they go to: compute, communication, ..."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is in the folder now."""

    name: str
    step: int
    time: float
    """When it was complete, in seconds since the epoch."""


@dataclass(frozen=True)
class RunHistory:
    """All that a run directory tells. Parts that aren't there are None or empty."""

    path: Path
    state: RunState
    job: JobValues = field(default_factory=dict)
    job_text: str = ""
    """`job.yaml` as it is."""
    steps: tuple[StepMetrics, ...] = ()
    """By step, each once."""
    evaluations: Mapping[str, tuple[EvaluationMetrics, ...]] = field(default_factory=dict)
    """By held-out set, in the order of steps."""
    tasks: Mapping[str, tuple[TaskMetrics, ...]] = field(default_factory=dict)
    """By task, in the order of steps."""
    warned: tuple[Warned, ...] = ()
    """Spikes, gradients that weren't finite, and what the curves say is wrong."""
    bad_lines: int = 0
    """Lines of the metrics that can't be read."""
    position: LogPosition = field(default_factory=LogPosition)
    """Where `follow` goes on."""
    events: tuple[LauncherEvent, ...] = ()
    """Faults, restarts, resumes and slow ranks, of all nodes, in the order of time."""
    saves: tuple[SavedCheckpoint, ...] = ()
    report: RunReport | None = None
    forecast: StepForecast | None = None
    environment: RunEnvironment | None = None
    data: DataSummary | None = None
    answers: tuple[str, ...] = ()
    """What the model said before training; after it, see `report.samples`."""

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @cached_property
    def total_steps(self) -> int | None:
        """How many steps the run has in all; None before anything tells."""
        steps = self.job.get("train.steps")
        if isinstance(steps, int) and steps:
            return steps
        if self.report is not None and self.report.finished:
            return self.report.training.step
        last = self.steps[-1] if self.steps else None
        if last is None or not last.seconds_left or not last.epoch:
            return None
        epochs = self.job.get("train.epochs")
        return round(last.step * float(epochs or 1) / last.epoch)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Tokens behind each of `steps`: what runs of other batches are aligned by."""
        return tuple(accumulate(step.tokens for step in self.steps))

    def tokens_at(self, step: int) -> int:
        """Tokens behind a step, which may be an evaluation's."""
        behind = 0
        for each, tokens in zip(self.steps, self.tokens, strict=True):
            if each.step > step:
                break
            behind = tokens
        return behind


def read_run_history(run_dir: Path) -> RunHistory:
    """Reads a run directory. What isn't there, or can't be read, is left out."""
    return _history(run_dir, _whole_log(run_dir))


def read_run_summary(run_dir: Path, most: int = 1 << 13) -> RunHistory:
    """`read_run_history` with the last lines of the metrics alone: for a list of runs."""
    return _history(run_dir, NewLines(read_tail(run_dir, most), LogPosition()))


def _history(run_dir: Path, found: NewLines) -> RunHistory:
    steps = {line.step: line for line in found.lines if isinstance(line, StepMetrics)}
    text = _text(run_dir / "job.yaml") or ""
    known = RunHistory(
        run_dir,
        "failed",
        job=_job_values(text),
        job_text=text,
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=_by_name(
            (line.set, line) for line in found.lines if isinstance(line, EvaluationMetrics)
        ),
        tasks=_by_name((line.task, line) for line in found.lines if isinstance(line, TaskMetrics)),
        warned=tuple(line for line in found.lines if isinstance(line, Warned)),
        bad_lines=found.bad,
        position=found.position,
        events=read_events(run_dir),
        saves=_saves(run_dir / "checkpoints"),
        report=_record(run_dir / "report.json", _reader(RunReport)),
        forecast=_record(run_dir / "forecast.json", _forecast),
        environment=_record(run_dir / "environment.json", _reader(RunEnvironment)),
        data=_record(run_dir / "data.json", _reader(DataSummary)),
        answers=_record(run_dir / "answers.json", _answers) or (),
    )
    state = state_now(known)
    torn = found.unfinished and state != "running"
    return replace(known, state=state, bad_lines=found.bad + torn)


def state_now(run: RunHistory) -> RunState:
    """The state by what was read of the run, and by the lock and the clock of this moment."""
    last = run.steps[-1] if run.steps else None
    return find_state(
        run.path,
        stopped=None if run.report is None else not run.report.finished,
        failed_at=max((each.time for each in run.events if each.kind == "failed"), default=None),
        last_step=last.step if last else 0,
        saved_step=run.saves[-1].step if run.saves else None,
        step_seconds=last.seconds if last else 0.0,
    )


def _whole_log(run_dir: Path) -> NewLines:
    found = follow(run_dir)
    while (more := follow(run_dir, found.position)).lines and not more.restarted:
        lines, bad = found.lines + more.lines, found.bad + more.bad
        found = replace(more, lines=lines, bad=bad)
    return replace(found, unfinished=more.unfinished)


def read_events(run_dir: Path) -> tuple[LauncherEvent, ...]:
    """What the launchers of all nodes saw, in the order of time."""
    found = []
    for path in sorted((run_dir / "logs").glob("events*.jsonl")):
        for line in (_text(path) or "").split("\n"):
            with suppress(ValidationError):
                found.append(LauncherEvent.model_validate_json(line))
    return tuple(sorted(found, key=lambda each: each.time))


def thin(
    points: Sequence[_Point], most: int, value: Callable[[_Point], float | None]
) -> list[_Point]:
    """At most `most` points in their order (4 at least), for drawing: the least and the greatest
    `value` of each stretch, and both ends, so that no spike is lost. None is no value."""
    found = (value(point) for point in points)
    numbers = np.array([np.nan if each is None else each for each in found])
    return [points[at] for at in thin_indices(numbers, most)]


def _by_name(lines: Iterable[tuple[str, _Scored]]) -> dict[str, tuple[_Scored, ...]]:
    """By name and in the order of steps; of a step that is there twice the last line counts."""
    found: dict[str, dict[int, _Scored]] = {}
    for name, line in lines:
        found.setdefault(name, {})[line.step] = line
    return {name: tuple(each[step] for step in sorted(each)) for name, each in found.items()}


def _saves(folder: Path) -> tuple[SavedCheckpoint, ...]:
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            number = path.name.removeprefix("step-")
            if number != path.name and number.isdecimal():
                with suppress(OSError):
                    time = (path / "manifest.json").stat().st_mtime
                    found.append(SavedCheckpoint(path.name, int(number), time))
    return tuple(sorted(found, key=lambda each: each.step))


def _job_values(text: str) -> JobValues:
    try:
        return yaml_leaves(text)
    except ValueError:
        return {}


def _forecast(text: str) -> StepForecast:
    found = json.loads(text)
    summary = found["summary"]
    seconds = dict(summary["step_seconds"])
    return StepForecast(
        tokens_per_second=summary["tokens_per_second"],
        step_seconds=seconds.pop("total"),
        peak_gib=summary["gpu_gib"]["peak"],
        allocated_gib=found["allocated_gib"],
        parts=seconds,
    )


def _answers(text: str) -> tuple[str, ...]:
    found = json.loads(text)
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _reader(kind: type[_Kind]) -> Callable[[str], _Kind]:
    """Reads a record of any version: fields that this one doesn't know are passed over."""
    return lambda text: kind.model_validate_json(text, extra="ignore")


def _record(path: Path, read: Callable[[str], _Point]) -> _Point | None:
    """What `read` makes of a small file; None where it can't."""
    text = _text(path)
    if text is None:
        return None
    try:
        return read(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _text(path: Path) -> str | None:
    try:
        return read_regular(path, _LARGEST, follow_links=False).decode(errors="replace")
    except OSError:
        return None
