"""Triton, or None where it isn't installed: the one place that tries to import it.

Kernels are plain functions until `jit` compiles them, so modules can be imported, and their
step-by-step twins used, on a machine without a GPU.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = tl = None


__all__ = ["jit", "tl", "triton"]


def jit(kernel: Any) -> Any:
    """`triton.jit(kernel)`; None without Triton."""
    return None if triton is None else triton.jit(kernel)
