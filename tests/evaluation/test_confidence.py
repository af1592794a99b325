"""Intervals beside published figures, and how often they hold what they promise."""

from __future__ import annotations

import random

import pytest

from shardtune.evaluation.confidence import bootstrap, interval, paired_difference, wilson


@pytest.mark.parametrize(
    ("right", "rows", "low", "high"),
    [
        # Newcombe 1998, table I: method 3 (Wilson's score without continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_is_as_published(right: int, rows: int, low: float, high: float) -> None:
    found = wilson(right, rows)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    assert found.mean == right / rows


def test_shares_get_wilson_and_other_scores_a_bootstrap() -> None:
    assert interval([0.0, 1.0, 1.0]) == wilson(2, 3)
    assert interval([0.5, 0.25, 1.0]) == bootstrap([0.5, 0.25, 1.0])


def test_the_bootstrap_holds_the_mean_about_19_times_in_20() -> None:
    draw = random.Random(0)
    hits = 0
    for trial in range(100):
        found = bootstrap([draw.random() for _ in range(60)], seed=trial)
        hits += found.low <= 0.5 <= found.high
    assert 88 <= hits <= 99


def test_the_same_questions_make_a_small_change_visible() -> None:
    before = [float(n % 2) for n in range(200)]
    after = [1.0 if n in (0, 2, 4, 6, 8, 10, 12, 14) else score for n, score in enumerate(before)]
    change = paired_difference(before, after)
    assert change.mean == pytest.approx(0.04)
    assert change.low > 0  # Wilson's intervals of the two overlap widely
    assert wilson(108, 200).low < wilson(100, 200).high


def test_no_rows_have_no_figure() -> None:
    assert interval([]).rows == 0
