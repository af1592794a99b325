"""What the memory is spent on: `gradient_checkpointing: auto`, and `micro_batch: auto` on GPUs.

Every level of recomputation that the engine has is forecast, those between `none` and `full` with
as many layers as fit that keep all, and the fastest that fits is taken. Of micro-batches about the
powers of two are forecast, and the smallest is taken that is about as fast as any that fits. A
little is left free: forecasts of our own jobs were off by 2 % of what was allocated, and the
allocator may reserve some more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardtune.config.auto import MICRO_BATCH, ResolvedJob, rows_of
from shardtune.config.job import Job
from shardtune.core.files.yaml_document import KeyPath
from shardtune.core.model.kind import ModelKind
from shardtune.core.model.shape import ModelShape
from shardtune.core.setup import Recompute
from shardtune.core.units import GIB
from shardtune.plan.cluster import Cluster
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.machine_profile import Measured

LEVELS: tuple[Recompute, ...] = ("none", "mlp", "most", "full")
"""The fastest first."""
SPARE = 0.03
"""Share of the memory that is left free where there is a choice."""
BETWEEN: tuple[Recompute, ...] = ("mlp", "most")
CHECKPOINTING: KeyPath = ("train", "gradient_checkpointing")
ABOUT_AS_FAST = 0.02
"""Share of a step's time that is no reason to take more rows."""


def levels_of(job: Job, kind: ModelKind = "decoder") -> tuple[Recompute, ...]:
    """The levels that a job's engine has for models of this kind: all or nothing where messages are
    sent inside layers, and for models with an encoder."""
    found = (level for level in LEVELS if level in job.strategy.capabilities.checkpointing)
    return tuple(level for level in found if kind == "decoder" or level not in BETWEEN)


def at_level(job: Job, level: Recompute, kept: int = 0) -> Job:
    update = {"gradient_checkpointing": level, "keep_layers": kept}
    return job.model_copy(update={"train": job.train.model_copy(update=update)})


def with_rows(job: Job, rows: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"micro_batch": rows})})


def has_room(found: Forecast) -> bool:
    """Whether it fits, and would if it took somewhat more."""
    return found.fits and -found.over >= SPARE * found.capacity


def filled(found: Forecast) -> Forecast:
    """The same with as many layers as fit that keep all, where it fits and its level allows it."""
    level = found.job.train.gradient_checkpointing
    if not has_room(found) or level not in BETWEEN:
        return found
    layers = found.shape.layers
    best, fits, too_many = found, 0, layers + 1
    while too_many - fits > 1:
        kept = (fits + too_many) // 2
        exempt = at_level(found.job, level, kept) if kept < layers else at_level(found.job, "none")
        tried = forecast(exempt, found.shape, found.cluster)
        if has_room(tried):
            best, fits = tried, kept
        else:
            too_many = kept
    return best


def least(job: Job, shape: ModelShape, cluster: Cluster) -> Forecast:
    """The fastest level that has room, or the leanest where none has."""
    levels = levels_of(job, shape.kind)
    found = [filled(forecast(at_level(job, level), shape, cluster)) for level in levels]
    roomy = [each for each in found if has_room(each)]
    if roomy:
        return min(roomy, key=lambda each: each.speed.step.total)
    return min(found, key=lambda each: max(each.over, each.host_over))


def within_memory(job: Job, shape: ModelShape, cluster: Cluster) -> ResolvedJob:
    """The job with a micro-batch and a level in the place of `auto`, and the numbers that speak for
    them."""
    reasons: dict[KeyPath, str] = {}
    if job.train.micro_batch == "auto":
        found = best_rows(job, shape, cluster)
        job = with_rows(job, found.work.micro_batch)
        reasons[MICRO_BATCH] = _why_rows(found)
    if job.train.gradient_checkpointing == "auto":
        found = least(job, shape, cluster)
        job = found.job
        reasons[CHECKPOINTING] = _why_level(found)
        if job.train.keep_layers:
            reasons["train", "keep_layers"] = f"of {shape.layers} layers, as many as fit"
    return ResolvedJob(job, reasons)


def leanest(job: Job, why: str) -> ResolvedJob:
    """The job with `full` in place of `auto`, where nothing can be predicted."""
    if job.train.gradient_checkpointing != "auto":
        return ResolvedJob(job, {})
    return ResolvedJob(at_level(job, "full"), {CHECKPOINTING: f"{why}, and this takes least"})


def best_rows(job: Job, shape: ModelShape, cluster: Cluster) -> Forecast:
    """The smallest micro-batch that is about as fast as any with room, or the leanest where none
    has. Rates that `bench` measured don't count: nodes with and without a profile shall come to the
    same number."""
    unmeasured = replace(cluster, measured=Measured())
    auto = job.train.gradient_checkpointing == "auto"
    found = [
        (least if auto else forecast)(with_rows(job, rows), shape, unmeasured)
        for rows in _sizes(job, cluster.gpus)
    ]
    roomy = [each for each in found if has_room(each)]
    if not roomy:
        return min(found, key=lambda each: max(each.over, each.host_over))
    enough = (1 + ABOUT_AS_FAST) * min(each.speed.step.total for each in roomy)
    return next(each for each in roomy if each.speed.step.total <= enough)


def powers(most: int) -> Iterator[int]:
    """1, 2, 4, 8 and so on."""
    power = 1
    while power <= most:
        yield power
        power *= 2


def _sizes(job: Job, ranks: int) -> list[int]:
    """Micro-batches in question, the smallest first: as rows are really cut, about the powers of
    two, and all at once."""
    rows = rows_of(job, ranks)
    rounds = {-(-rows // power) for power in powers(rows)} | {1}
    return sorted({-(-rows // each) for each in rounds})


def _why_rows(found: Forecast) -> str:
    ranks, taken = found.cluster.gpus, found.work.micro_batch
    rows, size = rows_of(found.job, ranks), found.memory.required / GIB
    uneven = found.job.train.global_batch % found.mesh.data_ranks
    several = f"{rows} or {rows + 1} rows" if uneven else f"{rows} row{'s' * (rows > 1)}"
    start = f"a rank has {several} a step; "
    start += f"{taken} x {found.work.sequence} tokens take {size:.1f} of {found.capacity / GIB:.1f}"
    if not found.fits:
        return f"{start} GiB, and nothing fits"
    asked = int(found.job.train.micro_batch)
    larger = [each for each in _sizes(found.job, ranks) if each > asked]
    if not larger:
        return f"{start} GiB"
    more = forecast(with_rows(found.job, larger[0]), found.shape, found.cluster)
    if has_room(more):
        return f"{start} GiB, and more rows gain little"
    return f"{start} GiB, {larger[0]} rows would take {more.memory.required / GIB:.1f}"


def _why_level(found: Forecast) -> str:
    level = found.job.train.gradient_checkpointing
    takes = f"takes {found.memory.required / GIB:.1f} of {found.capacity / GIB:.1f} GiB"
    if not found.fits:
        return f"nothing fits; this {takes}"
    if level == "none":
        return f"all fits: it {takes}"
    without = forecast(at_level(found.job, "none"), found.shape, found.cluster)
    longer = found.speed.step.total / without.speed.step.total - 1
    return (
        f"the fastest that leaves {SPARE:.0%} free: it {takes}, and {longer:.0%} more time "
        f"than none, which would take {without.memory.required / GIB:.1f} GiB"
    )
