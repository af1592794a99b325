"""Frozen weights in 8-bit floating point: what planner and model have to agree on."""

from __future__ import annotations

HESSIAN_BUDGET = 2 * 2**30
"""Bytes for what layers hear at a time of their inputs: the square of a layer's width, for each
that listens. What all layers of a model hear would be larger than the model. It depends on nothing
but the model: layers hear those before them, so who listens when decides what weights become, and
ranks have to agree."""


def outlier_columns(columns: int) -> int:
    """How many columns weights have twice: few beside all, and by sixteens, for the matrix unit."""
    return min(64, max(16, columns // 128 * 16)) if columns >= 64 else 0


def hessian_bytes(columns: int) -> int:
    """Bytes of what weights with so many columns hear."""
    return 4 * columns**2


def gptq_workspace_bytes(columns: int, size: int) -> int:
    """Bytes that it takes for a moment to round `size` numbers with so many columns, beside what
    they have heard: its inverse, which cuSOLVER finds in a copy; or else the numbers as they are
    read, twice in fp32, and rounded."""
    return max(2 * hessian_bytes(columns), size * (2 + 4 + 4 + 1))
