"""Scales of a chart: round ticks, and numbers as short as they can be read."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_LEAST = 1e-300  # of a distance: a tenth of it is a number still


@dataclass(frozen=True)
class ChartScale:
    """Maps values from `low` to `high` to pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.begin + share * (self.end - self.begin)


def round_ticks(low: float, high: float, about: int = 5, *, whole: bool = False) -> list[float]:
    """Round values of equal distance within `low` and `high`; `whole` ones of steps and tokens."""
    raw = max((high - low) / about, 1.0 if whole else 0.0)
    if not high > low or not _LEAST < raw < 1 / _LEAST:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    round_ones = [each for each in _ROUND if not whole or (each * power).is_integer()]
    distance = power * next(each for each in round_ones if each * power >= raw * 0.999)
    first = math.ceil(low / distance - 1e-9)
    last = math.floor(high / distance + 1e-9)
    return [round(number * distance, 12) for number in range(first, last + 1)]


def bounds(values: list[float], *, from_zero: bool) -> tuple[float, float]:
    """What an axis shows of them: a little more than there is, and never a range of nothing."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    room = 0.04 * (high - low)
    return (low if from_zero and low == 0 else low - room), high + room


def short(value: float) -> str:
    """`1.5M`, `0.0123`, `2e-05`: three or four digits."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            digits = {"G": 1e9, "M": 1e6, "k": 1e3}[letter]
            return f"{value / digits:.4g}{letter}"
    if size and size < 1e-3:
        return f"{value:.3g}"
    return f"{value:.4g}"
