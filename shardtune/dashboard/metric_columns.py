"""The metrics of a run as columns of numbers, which grow line by line and are thinned to be drawn.

A record object for each of 100,000 steps would take 150 MB and seconds; columns take 8 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from shardtune.core.record import Record
from shardtune.core.runs.thinning import SMOOTHED_PART, thin_indices

FIGURES = (
    "loss", "grad_norm", "learning_rate", "tokens_per_second", "memory_gib", "utilisation",
)  # fmt: skip
"""What is drawn, each as a curve of its own."""
_FIELDS = ("step", "tokens", *FIGURES)
_AT_ONCE = 2000  # lines whose objects are in memory together
_LARGEST = 1e12  # steps, and tokens in a step
_WARNINGS = 50  # that are kept, the last ones

Floats = npt.NDArray[np.float64]
MetricsObject = Mapping[str, Any]


class Curve(Record):
    """A thinned curve. Null where a number wasn't finite."""

    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    """Behind each of the steps, in all."""
    values: tuple[float | None, ...]


class MetricCurves(Record):
    """What a page draws of a run."""

    first: int
    last: int
    """Of all steps that there are."""
    figures: dict[str, Curve]
    smoothed: Curve
    """The loss, averaged over a window."""
    evaluations: dict[str, Curve]
    """The loss of each held-out set."""
    tasks: dict[str, Curve]
    """The score of each task of `evaluate.tasks`, from 0 to 1."""
    warnings: tuple[tuple[int, str], ...]
    """Steps at which something was amiss, and what."""


class MetricColumns:
    """The lines of `metrics.jsonl`, as far as they were added."""

    def __init__(self) -> None:
        self._rows = np.empty((1024, len(_FIELDS)))
        self._count = 0
        self._evaluations: dict[str, dict[int, float]] = {}
        self._tasks: dict[str, dict[int, float]] = {}
        self._warnings: list[tuple[int, str]] = []
        self.bad = 0
        """Lines that can't be read."""

    def __len__(self) -> int:
        return self._count

    def add(self, lines: bytes) -> None:
        """Takes whole lines. A step that comes again replaces it and what came after it."""
        whole = lines.split(b"\n")[:-1]
        for begin in range(0, len(whole), _AT_ONCE):
            self._add(whole[begin : begin + _AT_ONCE])

    def _add(self, lines: Sequence[bytes]) -> None:
        found = [_parsed(line) for line in lines]
        records = [record for record in found if record is not None]
        self.bad += len(found) - len(records)
        steps = [record for record in records if record["kind"] == "step"]
        for record in records if len(steps) < len(records) else ():
            self._note(record)
        del self._warnings[:-_WARNINGS]
        if steps:
            self._append(_numbers(steps))

    def _note(self, record: MetricsObject) -> None:
        """Keeps what a line of another kind than a step says."""
        try:
            if record["kind"] == "evaluation":
                name, step = str(record["set"]), _step(record)
                self._evaluations.setdefault(name, {})[step] = _number(record["loss"])
            elif record["kind"] == "task":
                name, step = str(record["task"]), _step(record)
                self._tasks.setdefault(name, {})[step] = _number(record["score"])
            elif isinstance(fact := record.get("fact"), str):
                self._warnings.append((_step(record), fact[:500]))
        except (ValueError, KeyError, TypeError, OverflowError):
            self.bad += 1

    def _append(self, rows: Floats) -> None:
        known = (rows[:, 0] >= 0) & (rows[:, 0] < _LARGEST)  # what isn't a number is neither
        self.bad += int((~known).sum())
        rows = rows[known]
        # Of steps that are there twice the later ones count: each must be below all that follow.
        following = np.minimum.accumulate(rows[::-1, 0])[::-1]
        rows = rows[np.append(rows[:-1, 0] < following[1:], True)[: len(rows)]]
        if not len(rows):
            return
        self._count = int(np.searchsorted(self._column("step"), rows[0, 0]))
        tokens = np.clip(np.nan_to_num(rows[:, 1]), 0, _LARGEST)
        rows[:, 1] = np.cumsum(tokens) + (self._column("tokens")[-1] if self._count else 0.0)
        needed = self._count + len(rows)
        if needed > len(self._rows):
            grown = np.empty((max(needed, 2 * len(self._rows)), len(_FIELDS)))
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : needed] = rows
        self._count = needed

    def _column(self, name: str) -> Floats:
        return self._rows[: self._count, _FIELDS.index(name)]

    def curves(
        self, most: int, begin: int | None = None, end: int | None = None, *, only: str = ""
    ) -> MetricCurves:
        """The curves between two steps, both included, with at most `most` points each."""
        steps = self._column("step")
        inside = slice(
            0 if begin is None else int(np.searchsorted(steps, begin)),
            len(steps) if end is None else int(np.searchsorted(steps, end, side="right")),
        )
        shown, tokens = steps[inside], self._column("tokens")[inside]

        def curve(values: Floats) -> Curve:
            kept = thin_indices(values, most)
            return _curve(shown[kept], tokens[kept], values[kept])

        names = (only,) if only else FIGURES
        low = -np.inf if begin is None else begin
        high = np.inf if end is None else end
        return MetricCurves(
            first=int(steps[0]) if len(steps) else 0,
            last=int(steps[-1]) if len(steps) else 0,
            figures={name: curve(self._column(name)[inside]) for name in names},
            smoothed=curve(_smoothed(self._column("loss")[inside])),
            evaluations={
                name: self._evaluated(found, low, high, most)
                for name, found in sorted(self._evaluations.items())
            },
            tasks={
                name: self._evaluated(found, low, high, most)
                for name, found in sorted(self._tasks.items())
            },
            warnings=tuple(each for each in self._warnings if low <= each[0] <= high),
        )

    def _evaluated(self, found: dict[int, float], low: float, high: float, most: int) -> Curve:
        steps = np.array(sorted(step for step in found if low <= step <= high), dtype=float)
        values = np.array([found[int(step)] for step in steps])
        kept = thin_indices(values, most)
        own = self._column("step")
        behind = np.searchsorted(own, steps[kept], side="right")
        tokens = np.append(0.0, self._column("tokens"))[behind]
        return _curve(steps[kept], tokens, values[kept])


def _curve(steps: Floats, tokens: Floats, values: Floats) -> Curve:
    return Curve(
        steps=tuple(steps.astype(int).tolist()),
        tokens=tuple(tokens.astype(int).tolist()),
        values=tuple(_rounded(values.tolist())),
    )


def _rounded(values: Iterable[float]) -> Iterable[float | None]:
    """Six digits are more than a screen shows."""
    return (float(f"{each:.6g}") if np.isfinite(each) else None for each in values)


def _smoothed(values: Floats) -> Floats:
    """The mean over a window around each value; what isn't finite isn't counted."""
    half = len(values) // SMOOTHED_PART
    known = np.isfinite(values)
    sums = np.append(0.0, np.cumsum(np.where(known, values, 0.0)))
    counts = np.append(0, np.cumsum(known))
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    number = counts[high] - counts[low]
    return np.where(number > 0, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan)


def _parsed(line: bytes) -> MetricsObject | None:
    """An object with a kind; None if the line is anything else."""
    try:
        found = from_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "kind" in found else None


def _numbers(steps: Sequence[MetricsObject]) -> Floats:
    """The fields of steps, a row each."""
    rows = np.empty((len(steps), len(_FIELDS)))
    for at, name in enumerate(_FIELDS):
        values = [step.get(name) for step in steps]
        try:
            rows[:, at] = values
        except (ValueError, TypeError, OverflowError):  # no line of ours has what isn't a number
            rows[:, at] = [_number(value) for value in values]
    return rows


def _step(record: MetricsObject) -> int:
    """ValueError, or another of those that are expected, where it is none."""
    step = int(record["step"])
    if not 0 <= step < _LARGEST:
        raise ValueError(step)
    return step


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan
