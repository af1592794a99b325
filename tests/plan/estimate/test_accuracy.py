"""The errors against published measurements stay within the bounds that we promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.contradictions import LayerKind, contradictory, kind_of
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
    disagreeing = contradictory([case for case in cases if case.source == SINGLE])
    found = judge(halves(cases)[1], Constants(), disagreeing)
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
    assert all(each.mean_agreeing <= 0.08 for each in found.tensor.values())
    assert found.tensor[8].agreeing == found.tensor[8].count
    assert found.missed_by_band == 0
    assert found.inside[0] / found.inside[1] >= 0.95
    # Nothing is lost on the way: every row is judged, or listed with its reason.
    assert len([case for case in cases if case.metric in ("memory", "throughput")]) > 300
    assert all(row.why for row in unknown)


@pytest.mark.slow
def test_layer_times_contradict_each_other_by_measurement_alone() -> None:
    cases = [case for case in read_all(REFERENCE)[0] if case.source == SINGLE]
    found = contradictory(cases)
    assert set(found) == {LayerKind(2, 1024, 4), LayerKind(4, 2048, 1), LayerKind(4, 2048, 2)}
    assert all(kind.has_all_of(each.smaller) for kind, each in found.items())
    # A third more time for all that is quick, and nothing contradicts anything.
    slower = [
        replace(case, measured=1.33 * (case.measured or 0.0)) if kind_of(case) in found else case
        for case in cases
    ]
    assert not contradictory(slower)


@pytest.mark.long
def test_no_constant_comes_from_a_single_row() -> None:
    fitting, _ = halves(read_all(REFERENCE)[0])
    alone = [each.name for each in provenance(fitting, Constants()) if each.rows < 2]
    assert alone == []
