"""A training step on this CPU in each precision: `python -m benchmarks.cpu_precision`.

The model of `benchmarks/loop.py` under our own engine on one thread: in fp32, in bf16 with products
as torch computes them and widened to fp32, and in fp16 with widened ones (without, a step takes
minutes where fp16 is slow). Seconds are the thread's own: others on the machine don't count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from benchmarks.loop import LENGTH, ROWS, make_batch, make_model
from benchmarks.table import write_table
from shardtune.compat.cpu_half_precision import widen_products
from shardtune.core.host.matmul_speed import cpu_name
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.kernels.measure_matmul import DTYPES, measure_cpu_matmul

WAYS: tuple[tuple[Precision, bool], ...] = (
    ("fp32", False),
    ("bf16", False),
    ("bf16", True),
    ("fp16", True),
)


def step_seconds(precision: Precision, steps: int, *, widened: bool) -> float:
    """CPU time of a step: the median, after one to warm up."""
    widen_products({DTYPES[precision]} if widened else ())
    schedule = Schedule("constant", 1e-4, 0, 10)
    setup = EngineSetup(precision, OptimizerSetup(), schedule, 1.0, 0)
    seconds = []
    with NativeEngine(make_model(), setup, World()) as engine:
        for step in range(steps + 1):
            begun = time.thread_time()
            engine.step([make_batch(step)]).read()
            seconds.append(time.thread_time() - begun)
    return statistics.median(seconds[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each (5)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    rates = measure_cpu_matmul()  # before anything is widened
    found = {}
    for precision, widened in WAYS:
        found[precision, widened] = step_seconds(precision, steps, widened=widened)
        print(f"{precision}, widened {widened}: {found[precision, widened]:.2f} s", flush=True)
    fp32 = found["fp32", False]
    rows = [
        [
            precision,
            "in fp32, rounded" if widened else "as torch does",
            f"{rates['fp32' if widened else precision] * 1e3:.0f} GFLOP/s",
            f"{seconds * 1e3:.0f} ms",
            f"{seconds / fp32:.2f}",
        ]
        for (precision, widened), seconds in found.items()
    ]
    write_table(
        "cpu_precision",
        "A training step on a CPU by precision",
        ["precision", "products", "a core's products", "a step", "of fp32"],
        rows,
        f"{cpu_name()}, one thread, CPU time: medians of {steps} steps of {ROWS} x {LENGTH} tokens "
        "with a Llama of 38 million parameters, all of them trained. What `train.precision: auto` "
        "takes follows from the third column; the rows with widened products are what a job gets "
        "that asks for 16 bits where they are slow.",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
