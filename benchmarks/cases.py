"""A published measurement as a case that the estimator can be asked about."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from shardtune.core.layout import AxisRule, Layout
from shardtune.core.mesh import Mesh
from shardtune.core.model.shape import ModelShape
from shardtune.parallel.ddp.strategy import DDP
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.plan.estimate.workload import NF4_DOUBLE_BITS, NF4_SINGLE_BITS, Workload

Row = dict[str, str]
Metric = Literal["memory", "throughput", "iteration"]
Counts = Literal["allocated", "reserved", "device", "required"]
"""What a memory figure counts: torch's tensors, its allocator's blocks, all of the device; or what
must fit, where a row says what just did."""
GIB = float(1 << 30)
USABLE = 0.985
"""Of the size that a card is sold by, what it has for use."""


@dataclass(frozen=True)
class Case:
    """One measurement, and everything that the estimator needs to predict it."""

    number: int
    """The row in its file, the first after the heading being 0."""
    source: str
    name: str
    metric: Metric
    measured: float | None
    """GiB, tokens/s on one GPU, or seconds a step; None where the run was out of memory."""
    shape: ModelShape
    gpu: str
    nodes: int
    layout: Layout
    mesh: Mesh
    work: Workload
    counts: Counts = "reserved"
    link: float | None = None
    """Gbit/s between nodes, for each node, where the source says it."""
    apart: str = ""
    """Why the row is judged apart: something that the estimate needs is known in part only."""


@dataclass(frozen=True)
class Unknown:
    """A row that can't be asked about, and why."""

    number: int
    source: str
    name: str
    why: str


class Missing(Exception):
    """A setting that the row doesn't give."""


@dataclass(frozen=True)
class Settings:
    """A row read: the strategy and the work."""

    layout: Layout
    mesh: Mesh
    work: Workload
    counts: Counts = "reserved"
    apart: str = ""


# Strategies --------------------------------------------------------------------------------------


def fsdp(
    ranks: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1
) -> tuple[Layout, Mesh]:
    """FSDP over `ranks`; ranks that share a long row divide the states too."""
    layout, mesh = FSDP().layout(), FSDP().mesh(ranks)
    return inside(layout, mesh, tensor, context, pipeline)


def ddp(ranks: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1) -> tuple[Layout, Mesh]:
    return inside(DDP().layout(), DDP().mesh(ranks), tensor, context, pipeline)


def zero(stage: int, ranks: int, **settings: object) -> tuple[Layout, Mesh]:
    strategy = DeepSpeed(zero_optimization=ZeRO.model_validate({"stage": stage, **settings}))
    return strategy.layout(), strategy.mesh(ranks)


def inside(
    layout: Layout, mesh: Mesh, tensor: int, context: int, pipeline: int
) -> tuple[Layout, Mesh]:
    axes = (("pipeline", pipeline), *mesh.axes, ("context", context), ("tensor", tensor))
    if context > 1:
        divides = frozenset({state for rule in layout.rules for state in rule.divides})
        layout = replace(layout, rules=(*layout.rules, AxisRule("context", divides)))
    kept = tuple((axis, size) for axis, size in axes if size > 1 or axis in dict(mesh.axes))
    return layout, Mesh(kept)


# Reading a row -----------------------------------------------------------------------------------


def integer(row: Row, key: str) -> int:
    found = re.fullmatch(r"(\d+)( \(longest\))?", row[key].strip())
    if not found:
        raise Missing(f"{key} is {row[key] or 'not given'}")
    return int(found[1])


def degree(row: Row, letters: str) -> int:
    found = re.search(rf"\b{letters}(\d+)", row["strategy"])
    return int(found[1]) if found else 1


def ranks_of(row: Row) -> int:
    return integer(row, "n_gpus")


def _checkpointing(row: Row) -> Literal["none", "selective", "full"]:
    word = row["grad_ckpt"]
    if word.startswith("full"):
        return "full"
    if word.startswith("none"):
        return "none"
    if word in ("selective(op)", "selective op"):
        return "selective"
    raise Missing(f"checkpointing is {word or 'not given'}")


def _bits(row: Row) -> float | None:
    quantized = {"nf4": NF4_SINGLE_BITS, "nf4-dq": NF4_DOUBLE_BITS, "nf4+dq": NF4_DOUBLE_BITS}
    return quantized.get(row["quant"])


def _attention(row: Row) -> Literal["sdpa", "flash", "eager"]:
    """SDPA had no cuDNN kernels before torch 2.5, at the end of 2024."""
    if row["flash"] == "no":
        return "eager"
    new = "_2025" in row["source"] or "Automodel" in row["source"]
    return "sdpa" if new else "flash"


def work_of(row: Row, **settings: object) -> Workload:
    work = Workload(
        micro_batch=integer(row, "micro_batch"),
        sequence=integer(row, "seq_len"),
        checkpointing=_checkpointing(row),
        fp8=("8" in row["quant"] and "fp" in row["quant"]) or "float8" in row["quant"],
        fp8_by_row="rowwise" in row["quant"],
        packed_bits=_bits(row),
        attention=_attention(row),
    )
    return replace(work, **settings)  # type: ignore[arg-type]
