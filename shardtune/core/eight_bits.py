"""Frozen weights in 8-bit floating point: what planner and model have to agree on."""

from __future__ import annotations


def columns_twice(columns: int) -> int:
    """How many columns weights have twice: few beside all, and by sixteens, for the matrix unit."""
    return min(64, max(16, columns // 128 * 16)) if columns >= 64 else 0
