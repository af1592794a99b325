"""Sigmoid, as kernels compute it on a GPU."""

from __future__ import annotations

from shardtune.kernels.triton_import import jit, tl


def _sigmoid_kernel(x):  # type: ignore[no-untyped-def]
    """1 / (1 + 2^(-x log2 e)) in two PTX instructions, each right to the last bit or two; Triton's
    own sigmoid also covers denormals, which can't come up here, and takes twice as many."""
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


sigmoid = jit(_sigmoid_kernel)
