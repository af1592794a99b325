"""A run as a line of the list: state, progress, last loss, time left, and a sparkline.

The list may hold hundreds of runs of many steps. Of each only the small files, the end of its
metrics and a few places in between are read, and again only when one of its files has changed. The
lock and the clock are asked each time: a run may end without a write.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from shardtune.core.files.regular_file import open_regular
from shardtune.core.files.yaml_leaves import Scalar
from shardtune.core.record import Record
from shardtune.core.runs.metrics_log import MOST_TAIL
from shardtune.core.runs.run_history import (
    JobValues,
    RunHistory,
    read_run_summary,
    state_now,
)
from shardtune.core.runs.run_state import RunState, last_write
from shardtune.dashboard.run_folder import FoundRun
from shardtune.dashboard.run_search import SearchedRun

SPARK_POINTS = 40
_SMALL = 1 << 16  # bytes of metrics that are read as a whole
_PLACE = 1 << 12  # bytes that are read at each place of a longer file: a few lines, mostly
_THREADS = 4  # a shared folder is slow to answer; on a fast disk more would be in their own way
_METRICS = "metrics.jsonl"
_WATCHED = (
    "run.json", "job.yaml", "environment.json", "forecast.json", _METRICS, "report.json",
    "checkpoints",
)  # fmt: skip

Identity = tuple[int, int, int] | None
Signature = dict[str, Identity]


class RunRow(Record):
    """A line of the list."""

    id: str
    name: str
    state: RunState
    model: str
    adapter: str
    strategy: str
    step: int
    steps: int | None
    """In all; null where nothing tells yet."""
    loss: float | None
    seconds_left: float | None
    """Of a run that trains."""
    tokens_per_second: float | None
    written: float
    """When it wrote last, in seconds since the epoch."""
    cause: str
    """Why it failed, in a line."""
    spark: tuple[float | None, ...]
    """The loss, from the first step to the last."""


@dataclass(frozen=True)
class RunSummary:
    """What a look at a run found."""

    run: FoundRun
    history: RunHistory
    """Of the metrics only the last lines."""
    spark: tuple[float | None, ...]

    @cached_property
    def row(self) -> RunRow:
        history, job = self.history, self.history.job
        last = history.steps[-1] if history.steps else None
        failed = [each.cause for each in history.events if each.kind == "failed"]
        running = history.state == "running"
        return RunRow(
            id=self.run.id,
            name=self.run.name,
            state=history.state,
            model=_word(job, "model.name").rstrip("/").rsplit("/", 1)[-1],
            adapter=_word(job, "adapter.type"),
            strategy=_word(job, "strategy.type"),
            step=last.step if last else 0,
            steps=history.total_steps,
            loss=last.loss if last else None,
            seconds_left=last.seconds_left if last and running else None,
            tokens_per_second=last.tokens_per_second if last else None,
            written=last_write(self.run.path),
            cause=failed[-1][:300] if failed and history.state == "failed" else "",
            spark=self.spark,
        )

    def searched(self) -> SearchedRun:
        row = self.row
        facts: dict[str, Scalar] = {"state": row.state, "step": row.step, "loss": row.loss}
        return SearchedRun(row.name, self.history.job, facts)


class RunSummaries:
    """The summaries of runs, kept for as long as their files are the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Path, tuple[Signature, RunSummary]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="run-row")

    def of(self, run: FoundRun) -> RunSummary:
        now = _signature(run.path)
        kept = self._kept.get(run.path)
        if kept is not None and kept[0] == now:
            found = kept[1]
            state = state_now(found.history)
            if state == found.history.state:
                return found
            found = replace(found, history=replace(found.history, state=state))
        else:
            same = kept is not None and kept[0][_METRICS] == now[_METRICS]
            spark = kept[1].spark if kept is not None and same else _spark(run.path)
            found = RunSummary(run, read_run_summary(run.path), spark)
        with self._lock:
            self._kept[run.path] = now, found
        return found

    def all(self, runs: Iterable[FoundRun]) -> list[RunSummary]:
        wanted = list(runs)
        found = list(self._pool.map(self.of, wanted))
        with self._lock:  # runs that are gone aren't kept
            there = {run.path for run in wanted}
            self._kept = {path: each for path, each in self._kept.items() if path in there}
        return found


def _signature(run: Path) -> Signature:
    found = {name: _identity(run / name) for name in _WATCHED}
    events = (run / "logs").glob("events*.jsonl")  # of each node
    return found | {path.name: _identity(path) for path in events}


def _identity(path: Path) -> Identity:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _spark(run: Path) -> tuple[float | None, ...]:
    """The loss at evenly spaced places of the metrics."""
    losses = list(_sampled(run))
    stride = max(1, -(-len(losses) // SPARK_POINTS))
    return (*losses[:-1:stride], *losses[-1:])


def _losses(lines: Iterable[bytes]) -> Iterator[float | None]:
    """The losses of steps; nothing of lines of another kind, or that can't be read."""
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            found = from_json(line)
            if found["kind"] == "step":
                loss = found["loss"]
                yield None if loss is None or not math.isfinite(loss) else float(f"{loss:.4g}")


def _sampled(run: Path) -> Iterator[float | None]:
    try:
        with open_regular(run / _METRICS, follow_links=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _SMALL:
                yield from _losses(file.read(_SMALL).split(b"\n")[:-1])
                return
            for place in range(SPARK_POINTS):
                yield from _loss_at(file, size, place)
    except OSError:
        return


def _loss_at(file: BinaryIO, size: int, place: int) -> list[float | None]:
    """The loss at one of the places, or the next one; at the last place the last one."""
    length = _PLACE
    while True:
        begin = max(0, size - length) * place // (SPARK_POINTS - 1)
        file.seek(begin)
        whole = file.read(length).split(b"\n")[1 if begin else 0 : -1]
        last = place == SPARK_POINTS - 1
        found = list(islice(_losses(reversed(whole) if last else whole), 1))
        if found or length >= min(size, MOST_TAIL):
            return found
        length *= 4  # a line that accounts for many ranks is long


def _word(job: JobValues, key: str) -> str:
    found = job.get(key)
    return "" if found is None else str(found)
