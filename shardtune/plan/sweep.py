"""A job forecast many times, with one or several of its values changed: `estimate --sweep`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from shardtune.config.job import Job
from shardtune.config.rules import check
from shardtune.core.files.yaml_document import dotted
from shardtune.core.model.shape import ModelShape
from shardtune.errors import JobError, Problem, ShardtuneError
from shardtune.plan.cluster import Cluster
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.on_cluster import resolve_as_asked

SWEEP_OPTION = "--sweep"
MOST_JOBS = 400
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class SweptKey:
    """A key of the job and the values that it takes."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SweepPoint:
    """The job with one choice of values; no forecast where it is refused."""

    values: tuple[str, ...]
    """Of the swept keys, in their order."""
    found: Forecast | None
    refused: str = ""


@dataclass(frozen=True)
class Sweep:
    """All points, in the order of the values; the last key changes fastest."""

    keys: tuple[SweptKey, ...]
    points: tuple[SweepPoint, ...]


def parse_sweep(words: Sequence[str]) -> tuple[SweptKey, ...]:
    """`train.micro_batch=1,2,4` or `data.sequence_length=512..65536`, which doubles."""
    found = []
    for word in words:
        key, separator, text = word.partition("=")
        values = _doubled(text) or tuple(text.split(","))
        if not separator or not key or not all(values):
            fix = "write KEY=1,2,4 or KEY=512..65536, which doubles"
            raise JobError(Problem(SWEEP_OPTION, f"{word!r} has no values", fix))
        found.append(SweptKey(key, values))
    count = 1
    for each in found:
        count *= len(each.values)
    if count > MOST_JOBS:
        fact = f"{count:,} jobs are more than {MOST_JOBS}"
        raise JobError(Problem(SWEEP_OPTION, fact, "sweep fewer values"))
    return tuple(found)


def _doubled(text: str) -> tuple[str, ...]:
    """The values of `512..65536`; none where it is no range."""
    found = _RANGE.fullmatch(text)
    if found is None or not 0 < int(found[1]) <= int(found[2]):
        return ()
    values = [int(found[1])]
    while 2 * values[-1] <= int(found[2]):
        values.append(2 * values[-1])
    return tuple(map(str, values))


def sweep(
    keys: Sequence[SweptKey],
    changed: Callable[[list[str]], tuple[Job, ModelShape]],
    cluster: Cluster,
) -> Sweep:
    """Every combination of values. `changed` is the job with these `KEY=VALUE` words, and the
    shape of its model."""
    points, refusals = [], []
    for values in product(*(each.values for each in keys)):
        words = [f"{each.key}={value}" for each, value in zip(keys, values, strict=True)]
        try:
            job, shape = changed(words)
            resolved = resolve_as_asked(job, shape, cluster).job
            check(resolved, dotted)
            points.append(SweepPoint(values, forecast(resolved, shape, cluster)))
        except ShardtuneError as error:
            first = error.problems[0]
            refusals.append(first)
            points.append(SweepPoint(values, None, f"{first.place}: {first.fact}"))
    if len(refusals) == len(points):
        fact = f"none of {len(points)} jobs can be had; the first: {points[0].refused}"
        raise JobError(Problem(SWEEP_OPTION, fact, refusals[0].fix))
    return Sweep(tuple(keys), tuple(points))
