"""Measures how fast this machine multiplies matrices in each precision, in milliseconds."""

from __future__ import annotations

import platform
import time
from typing import Any, get_args

import torch
from torch.nn import functional

from shardtune.compat.cpu_half_precision import widen_products
from shardtune.compat.one_thread import one_thread
from shardtune.core.matmul_speed import cpu_matmul_speed
from shardtune.core.setup import Precision

TOKENS, INPUTS, OUTPUTS = 128, 256, 256
TIMED_PRODUCTS = 4
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def measure_cpu_matmul() -> dict[Precision, float]:
    """10^12 operations a second of one core, by precision; 0 for one that is computed number by
    number, which isn't worth the time to measure it."""
    with one_thread():
        return {precision: _tflops(precision) for precision in get_args(Precision)}


def _tflops(precision: Precision) -> float:
    if _is_emulated(precision):
        return 0.0
    dtype = DTYPES[precision]
    inputs, weight = torch.ones(TOKENS, INPUTS, dtype=dtype), torch.ones(OUTPUTS, INPUTS).to(dtype)
    seconds = []
    with torch.no_grad():
        functional.linear(inputs, weight)  # which may compile a kernel
        for _ in range(TIMED_PRODUCTS):
            # Time of this thread alone: others may be busy on the same core.
            begun = time.thread_time()
            functional.linear(inputs, weight)
            seconds.append(time.thread_time() - begun)
    return 2 * TOKENS * INPUTS * OUTPUTS / max(min(seconds), 1e-9) / 1e12


def _is_emulated(precision: Precision) -> bool:
    """Whether this is an ARM CPU without instructions for it (Graviton 2, Ampere Altra). torch asks
    oneDNN for each product in vain there, and warns of it in fifty lines."""
    if platform.machine() != "aarch64" or precision == "fp32":
        return False
    asked: Any = torch.ops.mkldnn
    known = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    supported = {
        "bf16": asked._is_mkldnn_bf16_supported,
        "fp16": asked._is_mkldnn_fp16_supported,
    }[precision]
    return known and not supported()


def widen_slow_products() -> None:
    """For this process: products in 16 bits, where this CPU is slow in them, are computed in fp32
    and rounded."""
    speed = cpu_matmul_speed(measure_cpu_matmul)
    widen_products({DTYPES[each] for each in get_args(Precision) if each not in speed.fast})


def bf16_on_gpu() -> bool:
    """Whether the first GPU here has bf16. Nothing is computed on it."""
    return torch.cuda.get_device_capability(0) >= (8, 0)
