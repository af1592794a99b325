"""Confidence intervals: how far a figure from so many rows may be off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
"""Of the normal distribution: 95 % lie within so many standard deviations."""
RESAMPLES = 10_000
_BLOCK = 4_000_000  # rows drawn at once, so that memory stays small


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    rows: int


def interval(scores: Sequence[float], seed: int = 0) -> Interval:
    """Of a mean: Wilson's where each row is right or wrong, else by bootstrap."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(int(sum(scores)), len(scores))
    return bootstrap(scores, seed)


def wilson(right: int, rows: int) -> Interval:
    """Wilson's score interval of a share. It stays between 0 and 1, even for 0 of 10."""
    if rows == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    share, z2 = right / rows, Z95**2
    middle = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    spread = math.sqrt(share * (1 - share) / rows + z2 / (4 * rows**2)) * Z95 / (1 + z2 / rows)
    low = 0.0 if right == 0 else middle - spread
    high = 1.0 if right == rows else middle + spread
    return Interval(share, low, high, rows)


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """The middle 95 % of the means of samples drawn with replacement (percentile bootstrap)."""
    rows = len(values)
    if rows == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    sample = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(seed)
    block = max(1, min(RESAMPLES, _BLOCK // rows))
    means = [
        sample[draw.integers(0, rows, size=(min(block, RESAMPLES - done), rows))].mean(axis=1)
        for done in range(0, RESAMPLES, block)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(sample.mean()), float(low), float(high), rows)


def paired_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Interval:
    """Of the change, row by row: both models had the same questions, so luck in drawing these
    cancels out."""
    return bootstrap([b - a for a, b in zip(before, after, strict=True)], seed)
