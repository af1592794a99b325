"""Measures how fast this machine multiplies matrices in each precision, in milliseconds."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch.nn import functional

from shardtune.compat.cpu_half_precision import widen_products
from shardtune.compat.one_thread import one_thread
from shardtune.core.host.matmul_speed import cpu_matmul_speed
from shardtune.core.setup import Precision

TOKENS, INPUTS, OUTPUTS = 128, 256, 256
TIMED_PRODUCTS = 6
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def measure_cpu_matmul() -> dict[Precision, float]:
    """10^12 operations a second of one core, by precision; 0 for one that is computed number by
    number, which isn't worth the time to measure it."""
    with one_thread(), torch.no_grad():
        asked = [each for each in get_args(Precision) if not _is_emulated(each)]
        # Time of this thread alone: others may be busy on the same core.
        seconds = fastest({each: _product(each) for each in asked}, time.thread_time)
    found: dict[Precision, float] = dict.fromkeys(get_args(Precision), 0.0)
    return found | {
        each: 2 * TOKENS * INPUTS * OUTPUTS / max(taken, 1e-9) / 1e12
        for each, taken in seconds.items()
    }


def fastest(
    products: Mapping[Precision, Callable[[], object]], clock: Callable[[], float]
) -> dict[Precision, float]:
    """Seconds of the fastest of several tries of each. They take turns: a moment in which the
    machine is slow for a reason of its own falls on all, and the result is kept for good."""
    for product in products.values():
        product()  # which may compile a kernel
    seconds: dict[Precision, float] = dict.fromkeys(products, math.inf)
    for _ in range(TIMED_PRODUCTS):
        for precision, product in products.items():
            begun = clock()
            product()
            seconds[precision] = min(seconds[precision], clock() - begun)
    return seconds


def _product(precision: Precision) -> Callable[[], object]:
    dtype = DTYPES[precision]
    inputs, weight = torch.ones(TOKENS, INPUTS, dtype=dtype), torch.ones(OUTPUTS, INPUTS).to(dtype)
    return partial(functional.linear, inputs, weight)


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
