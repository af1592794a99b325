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
from benchmarks.provenance import provenance

pytestmark = pytest.mark.skipif(
    not (REFERENCE / "published_points.csv").is_file(),
    reason=f"the published measurements are not in {REFERENCE}",
)


@pytest.mark.slow
def test_errors_on_the_half_that_was_not_fitted() -> None:
    cases, unknown = read_all(REFERENCE)
    found = judge(halves(cases)[1], Constants())
    memory, rate = found.memory[-1], found.throughput[-1]
    times = {each.name: each.mean for each in found.iterations}
    right, asked = found.fitting
    assert memory.median <= 0.035
    assert memory.high <= 0.1
    assert right / asked >= 0.95
    assert rate.median <= 0.03
    assert rate.high <= 0.13
    assert times[SINGLE] <= 0.07
    assert times[SEVERAL] <= 0.1
    assert found.missed_by_band == 0
    assert found.inside[0] / found.inside[1] >= 0.95
    # Nothing is lost on the way: every row is judged, or listed with its reason.
    assert len([case for case in cases if case.metric in ("memory", "throughput")]) > 300
    assert all(row.why for row in unknown)


@pytest.mark.long
def test_no_constant_comes_from_a_single_row() -> None:
    fitting, _ = halves(read_all(REFERENCE)[0])
    alone = [each.name for each in provenance(fitting, Constants()) if each.rows < 2]
    assert alone == []
