"""What peers reach on one H200, from the table in `reference/gpu.md`, as cases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Metric, ddp
from benchmarks.published_models import shape_of
from shardtune.plan.estimate.workload import (
    NF4_DOUBLE_BITS,
    PURE_BF16,
    AdapterSize,
    Widths,
    Workload,
)

LORA: dict[str, Any] = {"adapter": AdapterSize(16), "widths": PURE_BF16}
FP32: dict[str, Any] = {**LORA, "widths": Widths(trained=4, gradients=4, optimizer=8)}
NF4: dict[str, Any] = {**LORA, "packed_bits": NF4_DOUBLE_BITS}
LIGER: dict[str, Any] = {"kernels": "fused", "loss": "fused"}
COMPILED: dict[str, Any] = {"kernels": "compiled", "loss": "fused"}
FULL: dict[str, Any] = {"checkpointing": "full"}

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "HF + PEFT, fp32 adapters under autocast, checkpointing": ("8B", FP32 | FULL),
    "HF + PEFT bf16, checkpointing": ("8B", LORA | FULL),
    "HF + PEFT bf16": ("8B", LORA),
    "Liger, checkpointing": ("8B", LORA | LIGER | FULL),
    "per-layer compile + Liger fused loss, checkpointing": ("8B", LORA | COMPILED | FULL),
    "Liger": ("8B", LORA | LIGER),
    "per-layer compile + HF loss": ("8B", LORA | {"kernels": "compiled"}),
    "per-layer compile + Liger fused loss": ("8B", LORA | COMPILED),
    "torchtune + compile": ("8B", LORA | {"kernels": "compiled", "loss": "chunked"}),
    "QLoRA NF4, HF + PEFT, checkpointing": ("8B", NF4 | FULL),
    "QLoRA NF4, Liger, checkpointing": ("8B", NF4 | LIGER | FULL),
    "QLoRA NF4, Liger": ("8B", NF4 | LIGER),
    "70B shape QLoRA NF4, HF, checkpointing": ("70B", NF4 | FULL),
    "70B shape QLoRA NF4, Liger, checkpointing": ("70B", NF4 | LIGER | FULL),
    "1B shape, all weights, HF": ("1B", {"widths": PURE_BF16}),
    "1B shape, all weights, per-layer compile + fused loss": (
        "1B",
        {"widths": PURE_BF16, **COMPILED},
    ),
    "1B shape, all weights, Liger": ("1B", {"widths": PURE_BF16, **LIGER}),
}
"""Rows whose settings we know. TRL's and Unsloth's own loss and checkpointing are not described,
nor how much compile's memory budget recomputes."""
SHAPES = {"8B": "Llama-3.1-8B", "70B": "Llama-3.1-70B", "1B": "Llama-3.2-1B"}


def read_peers(path: Path) -> Iterator[Case]:
    """The rows of the table in their order, each batch a case of its own."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] not in METHODS or len(cells) != 5:
            continue
        size, settings = METHODS[cells[0]]
        rates = [float(rate.replace(",", "")) for rate in cells[2].split("/")]
        for batch, rate in zip(cells[1].split("/"), rates, strict=True):
            rows, length = map(int, re.findall(r"\d+", batch))
            work = replace(Workload(rows, length), **settings)
            measured: tuple[tuple[Metric, float], ...] = (
                ("throughput", rate),
                ("memory", float(cells[4])),
            )
            for metric, value in measured:
                yield Case(
                    number,
                    "peers on one H200",
                    f"{cells[0]}, {batch.strip()}",
                    metric,
                    value,
                    shape_of(SHAPES[size]),
                    "H200-141GB",
                    1,
                    *ddp(1),
                    work,
                    "allocated",
                )
