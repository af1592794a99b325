"""Memory of FP8 weights and their calibration: what planner and model have to agree on."""

from __future__ import annotations

HESSIAN_BUDGET = 2 * 2**30
"""Bytes of the Hessians that are collected at a time (a layer's is the square of its width). Those
of all layers of a model would be larger than the model. It is a constant: layers are calibrated on
the quantized ones before them, so the groups decide what weights become, and ranks have to
agree."""


def outlier_columns(columns: int) -> int:
    """How many outlier columns weights have twice: few beside all, and by sixteens, for tensor
    cores."""
    return min(64, max(16, columns // 128 * 16)) if columns >= 64 else 0


def hessian_bytes(columns: int) -> int:
    """Bytes of the Hessian of weights with so many columns, in fp32."""
    return 4 * columns**2


def gptq_workspace_bytes(columns: int, size: int) -> int:
    """Bytes that GPTQ takes for a moment for `size` weights with so many columns, beside the
    Hessian: its inverse, which cuSOLVER finds in a copy; or else the weights as they are read,
    twice in fp32, and quantized."""
    return max(2 * hessian_bytes(columns), size * (2 + 4 + 4 + 1))
