"""The errors against published measurements stay within the bounds that we promise."""

from __future__ import annotations

import pytest

from benchmarks.judging import (
    REFERENCE,
    SEVERAL,
    SINGLE,
    Constants,
    halves,
    judge,
    read_all,
)

pytestmark = pytest.mark.skipif(
    not (REFERENCE / "published_points.csv").is_file(),
    reason=f"the published measurements are not in {REFERENCE}",
)


def test_errors_on_the_half_that_was_not_fitted() -> None:
    cases, unknown = read_all(REFERENCE)
    found = judge(halves(cases)[1], Constants())
    memory, rate = found.memory[-1], found.throughput[-1]
    times = {each.name: each.mean for each in found.iterations}
    right, asked = found.fitting
    assert memory.median <= 0.05
    assert memory.high <= 0.12
    assert right / asked >= 0.95
    assert rate.mean <= 0.15
    assert times[SINGLE] <= 0.08
    assert times[SEVERAL] <= 0.14
    # Nothing is lost on the way: every row is judged, or listed with its reason.
    assert len([case for case in cases if case.metric in ("memory", "throughput")]) > 300
    assert all(row.why for row in unknown)
