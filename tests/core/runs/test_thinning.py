"""Thinning keeps the ends and every spike, and no more points than were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from shardtune.core.runs.thinning import thin_indices


@pytest.mark.parametrize("count", [0, 1, 4, 5, 99, 10_000])
@pytest.mark.parametrize("most", [0, 4, 7, 100])
def test_points_are_few_in_order_and_have_both_ends(count: int, most: int) -> None:
    kept = thin_indices(np.random.default_rng(0).normal(size=count), most)
    assert len(kept) <= max(most, 4)
    assert np.all(np.diff(kept) > 0)
    assert count == 0 or (kept[0], kept[-1]) == (0, count - 1)


def test_a_spike_of_one_point_is_kept_wherever_it_is() -> None:
    for place in range(1000):
        values = np.zeros(1000)
        values[place] = 9.0
        assert place in thin_indices(values, 40)


def test_what_is_not_finite_is_no_spike() -> None:
    values = np.sin(np.arange(1000.0))
    values[100:900] = np.nan
    values[500] = 7.0
    kept = thin_indices(values, 100)
    assert 500 in kept
    assert np.isfinite(values[kept]).all()
