"""Which measurements each fitted constant comes from: those whose prediction it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.calibration import FITTED, FITTED_MEMORY, SHARED, fitting_cases
from benchmarks.cases import Case
from benchmarks.judging import Constants, cluster_of, errors
from shardtune.plan.estimate.constants import beginning_of

NUDGE, MOVED = 1.1, 1e-3
"""A constant that is larger by a tenth moves what comes from it by more than a thousandth."""


@dataclass(frozen=True)
class Provenance:
    """A fitted constant and the rows that had a say in it."""

    name: str
    rows: int
    sources: tuple[tuple[str, int], ...]
    """Each with how many of the rows, the most first."""


def provenance(cases: Sequence[Case], constants: Constants) -> Iterator[Provenance]:
    """Of every constant that is fitted on these cases."""
    known = fitting_cases(cases)
    memory = [case for case in known if case.metric == "memory"]
    timed = [case for case in known if case.metric != "memory"]
    for name in FITTED_MEMORY:
        value = getattr(constants.memory, name) * NUDGE
        other = replace(constants, memory=replace(constants.memory, **{name: value}))
        yield _of(name, memory, constants, other)
    for chip, names in FITTED.items():
        mine = [c for c in timed if beginning_of(cluster_of(c).gpu.name) == chip]
        for name in names:
            changed = replace(
                constants.chips[chip], **{name: getattr(constants.chips[chip], name) * NUDGE}
            )
            other = replace(constants, chips=constants.chips | {chip: changed})
            yield _of(f"{chip}: {name}", mine, constants, other)
        for name in SHARED if chip == "A100" else ():
            value = getattr(constants.time, name) * NUDGE
            other = replace(constants, time=replace(constants.time, **{name: value}))
            yield _of(name, mine, constants, other)


def _of(name: str, cases: Sequence[Case], now: Constants, then: Constants) -> Provenance:
    change = np.abs(np.log1p(errors(cases, then)) - np.log1p(errors(cases, now)))
    moved = [case for case, by in zip(cases, change.tolist(), strict=True) if by > MOVED]
    return Provenance(name, len(moved), tuple(Counter(c.source for c in moved).most_common()))
