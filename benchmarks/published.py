"""Published measurements, read: each row becomes a case, or a reason why it can't."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.cases import GIB, USABLE, Case, Missing, Row, Unknown, ddp, ranks_of
from benchmarks.published_models import gpt_shape, shape_of
from benchmarks.sources import READERS
from shardtune.plan.estimate.workload import MIXED, Workload

NOT_A_RUN = {
    "analytic": "a closed form, held by tests/plan/estimate",
    "rule_of_thumb": "a rule of thumb, not a measurement",
}


def read_points(path: Path) -> Iterator[Case | Unknown]:
    """Every row of the file, as a case or with the reason why not."""
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            source = short(row["source"])
            name = f"{row['model']}, {row['n_gpus'] or '?'} x {row['gpu']}, {row['strategy']}"
            try:
                yield _case(number, source, name, row)
            except Missing as missing:
                yield Unknown(number, source, name, str(missing))


def short(source: str) -> str:
    """A source's name for a table."""
    for known in READERS:
        if source.startswith(known):
            gpu = re.search(r"\[(\w+ \d+GB)( (FP8|BF16))?", source)
            return known + (f" {gpu[1]}" if gpu else "")
    return source.split(" (")[0].split(" [")[0]


def _case(number: int, source: str, name: str, row: Row) -> Case:
    if row["kind"] in NOT_A_RUN:
        raise Missing(NOT_A_RUN[row["kind"]])
    if row["metric"] in ("mfu", "tflops_per_gpu"):
        raise Missing("the same run's tokens/s, or a rate without settings")
    reader = next((READERS[key] for key in READERS if row["source"].startswith(key)), None)
    if reader is None:
        raise Missing("settings: micro-batch, lengths or checkpointing are not published")
    try:
        shape = shape_of(row["model"])
    except KeyError:
        raise Missing("the model's shape") from None
    if row["metric"] == "peak_mem_GB" and "CPU" in row["unit"]:
        raise Missing("CPU memory of a run without settings")
    settings = reader(row)
    memory = row["metric"] == "peak_mem_GB"
    measured = _gib(row) if memory else _rate(row)
    if settings.counts == "required" and measured is not None:
        measured *= USABLE
    return Case(
        number,
        source,
        name,
        "memory" if memory else "throughput",
        measured,
        shape,
        row["gpu"],
        int(row["n_nodes"] or 1),
        settings.layout,
        settings.mesh,
        settings.work,
        settings.counts,
        _link(row),
        settings.apart,
    )


def _gib(row: Row) -> float | None:
    value, unit = row["value"], row["unit"]
    if value == "OOM":
        return None
    low, _, high = value.partition("-")
    number = (float(low) + float(high)) / 2 if high else float(low)
    # Automodel's guide has the same figure once more, as a line of the log that says GiB.
    decimal = "1e9" in unit or row["source"].startswith(("Lightning-AI", "NVIDIA-NeMo/Megatron"))
    return number * 1e9 / GIB if decimal else number


def _rate(row: Row) -> float:
    # "As printed" is a rate of one GPU: the text's 2,200 beside it is half of a run's 4,342.
    total = row["unit"] in ("tok/s total", "tok/s")
    return float(row["value"]) / (ranks_of(row) if total else 1)


def _link(row: Row) -> float | None:
    found = re.search(r"(\d+) ?Gbps", row["gpu"] + row["source"])
    if not found:
        return None
    return float(found[1])


# Iteration times ---------------------------------------------------------------------------------

VOCAB = 50257
"""GPT-2's: the default of vTrain's configurations."""


def _padded(tensor: int) -> int:
    """Slices must be equal: Megatron pads to a multiple of 128 for each."""
    step = 128 * tensor
    return VOCAB if tensor == 1 else -(-VOCAB // step) * step


def read_iterations(path: Path, *, nodes: bool) -> Iterator[Case]:
    """Steps of GPTs on A100s, cut three ways: what Megatron-DeepSpeed took, by vTrain's authors
    (arXiv 2312.12391). The files name neither precision nor recomputation: fp16 with fp32 gradients
    as Megatron has, and on several nodes everything recomputed (175 B would not fit otherwise).
    vTrain simulates those of one node with recomputation, too; but 8 rows of hidden size 2,048 then
    leave 3 of their layer's 17 ms for all that isn't a product, and that takes 4 at the least."""
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            gpus, batch, rows = (int(row[k]) for k in ("# GPUs", "global batch", "micro batch"))
            tensor, data, pipeline = (
                int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline")
            )
            hidden, heads, layers = (
                int(row[k]) for k in ("hidden size", "attention heads", "# layers")
            )
            layout, mesh = ddp(data, tensor=tensor, pipeline=pipeline)
            work = Workload(
                micro_batch=rows,
                sequence=int(row["sequence length"]),
                microbatches=batch // (rows * data),
                widths=replace(MIXED, gradients=4),
                checkpointing="full" if nodes else "none",
                attention="eager",
                kernels="fused",
                dropout=True,
                attention_dropout=True,
                overlap=False,
            )
            yield Case(
                number,
                path.stem,
                f"h {hidden} L {layers}, batch {rows} of {batch}, "
                f"tensor {tensor} data {data} pipeline {pipeline}",
                "iteration",
                float(row["iteration time (ms)"]) / 1e3,
                gpt_shape(hidden, layers, heads, _padded(tensor)),
                "A100-80GB",
                max(1, gpus // 8) if nodes else 1,
                layout,
                mesh,
                work,
            )
