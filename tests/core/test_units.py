"""Figures as a person reads them."""

from __future__ import annotations

import pytest

from shardtune.core.units import in_units, three_digits

UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"))


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.01234, "0.0123"), (1.5, "1.5"), (999.4, "999"), (999.6, "1,000"), (12345.6, "12,346")],
)
def test_no_exponent_where_there_are_more_than_three_digits(value: float, words: str) -> None:
    assert three_digits(value) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (999, "999"),
        (134_515_008, "135 M"),
        (999_499_999, "999 M"),
        (999_885_952, "1 B"),  # Gemma 3 1B
        (671_026_419_200, "671 B"),
        (1_026_470_000_000, "1.03 T"),
        (5 * 10**15, "5,000 T"),
    ],
)
def test_a_count_is_in_the_largest_unit_that_it_comes_to(count: int, words: str) -> None:
    assert in_units(count, UNITS) == words
