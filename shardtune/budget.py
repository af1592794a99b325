"""The least recomputation that fits: what `gradient_checkpointing: auto` stands for.

Every level that the engine has is forecast, those between `none` and `full` with as many layers as
fit that keep all. Of what fits the fastest is taken. A little is left free: forecasts of our own
jobs were off by 2 % of what was allocated, and the allocator may reserve some more.
"""

from __future__ import annotations

from dataclasses import replace

from shardtune.core.cluster import Cluster
from shardtune.core.document import KeyPath
from shardtune.core.setup import Recompute
from shardtune.core.shape import ModelShape
from shardtune.forecast import GIB, Forecast, forecast
from shardtune.job import Job
from shardtune.resolve import ResolvedJob, leaves_layers_alone

LEVELS: tuple[Recompute, ...] = ("none", "mlp", "most", "full")
"""The fastest first."""
SPARE = 0.03
"""Share of the memory that is left free where there is a choice."""
BETWEEN: tuple[Recompute, ...] = ("mlp", "most")
KEY: KeyPath = ("train", "gradient_checkpointing")


def levels_of(job: Job, ranks: int) -> tuple[Recompute, ...]:
    """The levels that a job's engine has; where messages are sent inside layers, all or nothing."""
    if leaves_layers_alone(job.strategy, job.strategy.mesh(ranks)):
        return tuple(level for level in LEVELS if level not in BETWEEN)
    return LEVELS


def at_level(job: Job, level: Recompute, kept: int = 0) -> Job:
    update = {"gradient_checkpointing": level, "keep_layers": kept}
    return job.model_copy(update={"train": job.train.model_copy(update=update)})


def has_room(found: Forecast) -> bool:
    """Whether it fits, and would if it took somewhat more."""
    return found.fits and -found.over >= SPARE * found.capacity


def filled(found: Forecast) -> Forecast:
    """The same with as many layers as fit that keep all, where it fits and its level allows it."""
    level = found.job.train.gradient_checkpointing
    if not has_room(found) or level not in BETWEEN:
        return found
    best, fits, too_many = found, 0, found.shape.layers
    while too_many - fits > 1:
        kept = (fits + too_many) // 2
        tried = forecast(at_level(found.job, level, kept), found.shape, found.cluster)
        if has_room(tried):
            best, fits = tried, kept
        else:
            too_many = kept
    return best


def least(job: Job, shape: ModelShape, cluster: Cluster) -> Forecast:
    """The fastest level that has room, or the leanest where none has."""
    found = [
        filled(forecast(at_level(job, level), shape, cluster))
        for level in levels_of(job, cluster.gpus)
    ]
    roomy = [each for each in found if has_room(each)]
    if roomy:
        return min(roomy, key=lambda each: each.speed.step.total)
    return min(found, key=lambda each: max(each.over, each.host_over))


def within_memory(resolved: ResolvedJob, shape: ModelShape, cluster: Cluster) -> ResolvedJob:
    """The job with a level in place of `auto`, and the numbers that speak for it."""
    if resolved.job.train.gradient_checkpointing != "auto":
        return resolved
    found = least(resolved.job, shape, cluster)
    reasons = {**resolved.reasons, KEY: _reason(found)}
    if found.job.train.keep_layers:
        reasons["train", "keep_layers"] = f"of {shape.layers} layers, as many as fit"
    return replace(resolved, job=found.job, reasons=reasons)


def leanest(resolved: ResolvedJob, why: str) -> ResolvedJob:
    """The job with `full` in place of `auto`, where nothing can be foretold."""
    if resolved.job.train.gradient_checkpointing != "auto":
        return resolved
    reason = f"{why}, and this takes least"
    return ResolvedJob(at_level(resolved.job, "full"), {**resolved.reasons, KEY: reason})


def _reason(found: Forecast) -> str:
    level = found.job.train.gradient_checkpointing
    takes = f"takes {found.memory.required / GIB:.1f} of {found.capacity / GIB:.1f} GiB"
    if not found.fits:
        return f"nothing fits; this {takes}"
    if level == "none":
        return f"all fits: it {takes}"
    without = forecast(at_level(found.job, "none"), found.shape, found.cluster)
    longer = found.speed.step.total / without.speed.step.total - 1
    return (
        f"the least that fits: it {takes}, where none would take "
        f"{without.memory.required / GIB:.1f}, and {longer:.0%} more time"
    )
