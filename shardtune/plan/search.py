"""Which strategy: every candidate is forecast, the best is chosen, and each loser says why.

What is searched never changes the result of training: strategy, degrees, offload, recomputation and
the size of a micro-batch, at a fixed global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from shardtune.config.auto import leaves_layers_alone
from shardtune.config.job import Job
from shardtune.config.rules import check
from shardtune.core.model.parallel_plan import SHARDABLE_FAMILIES, degrees_of
from shardtune.core.model.shape import ModelShape
from shardtune.errors import JobError, ModelError
from shardtune.parallel import DDP, FSDP, DeepSpeed, Pipeline, Strategy, Tensor
from shardtune.plan.cluster import Cluster
from shardtune.plan.explain import ALIKE, praise_or_blame
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.memory_budget import BETWEEN, at_level, filled, levels_of, powers

Aim = Literal["time", "cost", "memory"]


@dataclass(frozen=True)
class Choice:
    """A strategy to try. Of each kind, which is the same with other degrees, the best is shown."""

    kind: str
    name: str
    strategy: Strategy


@dataclass(frozen=True)
class Candidate:
    """A strategy at its best, or the reason why it can't be had."""

    name: str
    found: Forecast | None
    refused: str = ""
    why: str = ""
    """What speaks for it, or against it."""

    @property
    def fits(self) -> bool:
        return self.found is not None and self.found.fits


@dataclass(frozen=True)
class Ranking:
    """All candidates, the best first."""

    candidates: tuple[Candidate, ...]
    aim: Aim

    @property
    def best(self) -> Candidate | None:
        first = self.candidates[0]
        return first if first.fits else None


def rank(
    job: Job,
    shape: ModelShape,
    cluster: Cluster,
    aim: Aim = "time",
    *,
    deepspeed: bool = True,
) -> Ranking:
    """Every strategy on all GPUs of the cluster, each with the settings that suit it best.

    Without `deepspeed`, which may not be installed, only those of PyTorch.
    """
    found = []
    for _, kind in groupby(choices(shape, cluster), key=lambda choice: choice.kind):
        wanted = [each for each in kind if deepspeed or not isinstance(each.strategy, DeepSpeed)]
        candidates = [_best(each, job, shape, cluster, aim) for each in wanted]
        if candidates:
            found.append(min(candidates, key=lambda each: _order(each, aim)))
    found.sort(key=lambda each: _order(each, aim))
    best = found[0].found if found[0].fits else None
    return Ranking(tuple(replace(each, why=_why(each, best)) for each in found), aim)


def _why(each: Candidate, best: Forecast | None) -> str:
    if each.found is None:
        return f"can't be had: {each.refused}"
    return praise_or_blame(each.found, best)


# What is tried -----------------------------------------------------------------------------------


def choices(shape: ModelShape, cluster: Cluster) -> Iterator[Choice]:
    """The strategies worth trying on a cluster, the simplest first."""
    cpu = {"device": "cpu"}
    yield _only("ddp" if cluster.gpus > 1 else "one GPU", DDP())
    if cluster.gpus > 1:
        for stage in (1, 2, 3):
            yield _only(f"zero{stage}", _zero(stage))
        yield _only("fsdp", FSDP())
        if cluster.nodes > 1:
            yield _only("fsdp hybrid", FSDP(sharding="hybrid", replicas=cluster.nodes))
            if cluster.gpus_per_node > 1:
                size = cluster.gpus_per_node
                yield _only("zero3 + hpZ", _zero(3, zero_hpz_partition_size=size))
        yield from _cutting(shape, cluster)
    if cluster.gpu.name == "CPU":
        return  # all is in main memory anyway
    yield _only("zero2, optimizer in main memory", _zero(2, offload_optimizer=cpu))
    yield _only("fsdp, all in main memory", FSDP(offload="cpu"))
    yield _only("zero3, all in main memory", _zero(3, offload_optimizer=cpu, offload_param=cpu))


def _only(name: str, strategy: Strategy) -> Choice:
    return Choice(name, name, strategy)


def _zero(stage: int, **settings: Any) -> DeepSpeed:
    return DeepSpeed.model_validate({"zero_optimization": {"stage": stage, **settings}})


def _cutting(shape: ModelShape, cluster: Cluster) -> Iterator[Choice]:
    """Strategies that cut the model itself: slices inside a node, stages anywhere."""
    if shape.family not in SHARDABLE_FAMILIES:
        yield Choice("cut", "tensor or pipeline", Tensor(degree=2))  # to be refused, with a reason
        return
    slices = [n for n in degrees_of(shape) if n > 1 and cluster.gpus_per_node % n == 0]
    deepest = min(shape.layers, cluster.gpus)
    stages = [n for n in powers(deepest) if n > 1 and cluster.gpus % n == 0]
    for n in slices:
        yield Choice("tensor", f"tensor({n})", Tensor(degree=n))
    for n in slices:
        if n < cluster.gpus:
            yield Choice("fsdp + tensor", f"fsdp + tensor({n})", FSDP(tensor=n))
    for n in stages:
        yield Choice("pipeline", f"pipeline({n})", Pipeline(stages=n))
    for n in stages:
        if n < cluster.gpus:
            yield Choice("fsdp + pipeline", f"fsdp + pipeline({n})", FSDP(pipeline=n))
    most = max(slices, default=1)
    for n in stages:
        if most > 1 and cluster.gpus % (n * most) == 0:
            name = f"pipeline({n}) + tensor({most})"
            yield Choice("pipeline + tensor", name, Pipeline(stages=n, tensor=most))


def _best(choice: Choice, job: Job, shape: ModelShape, cluster: Cluster, aim: Aim) -> Candidate:
    """The strategy with the micro-batch and the recomputation that suit it best."""
    variants = [tried(each, shape, cluster) for each in _variants(job, choice.strategy, cluster)]
    forecasts = [each for each in variants if isinstance(each, Forecast)]
    if not forecasts:
        refused = next(each for each in variants if isinstance(each, str))
        return Candidate(choice.name, None, refused)
    best = _leading(forecasts, aim)
    return Candidate(choice.name, best if aim == "memory" else filled(best))


def _leading(forecasts: Sequence[Forecast], aim: Aim) -> Forecast:
    fitting = [each for each in forecasts if each.fits]
    if fitting:
        return min(fitting, key=lambda each: _cost(each, aim))
    return min(forecasts, key=lambda each: max(each.over, each.host_over))


def tried(job: Job, shape: ModelShape, cluster: Cluster) -> Forecast | str:
    """The forecast, or why the job is refused."""
    try:
        check(job, lambda path: ".".join(map(str, path)))
        return forecast(job, shape, cluster)
    except (JobError, ModelError) as error:
        return error.problems[0].fact


def _variants(job: Job, strategy: Strategy, cluster: Cluster) -> Iterator[Job]:
    launch = job.launch.with_processes(cluster.gpus)
    mesh = strategy.mesh(cluster.gpus)
    rows = -(-job.train.global_batch // mesh.data_ranks)
    plain = {"kernels": "eager", "loss": "plain"} if leaves_layers_alone(strategy, mesh) else {}
    for micro in powers(rows):
        train = job.train.model_copy(update={"micro_batch": micro, **plain})
        each = job.model_copy(update={"strategy": strategy, "train": train, "launch": launch})
        for level in levels_of(each, cluster.gpus):
            if level not in BETWEEN or train.kernels == "compiled":
                yield at_level(each, level)


def _cost(found: Forecast, aim: Aim) -> tuple[float, float]:
    """What is to be small; among equals, what is left of it is the memory."""
    if aim == "memory":
        return found.memory.peak, found.speed.step.total
    # Money is time: the cluster is given.
    return round(found.speed.step.total / (1 + ALIKE), 4), found.memory.peak


def _order(each: Candidate, aim: Aim) -> tuple[float, ...]:
    if each.found is None:
        return (2.0,)
    if not each.fits:
        return 1.0, max(each.found.over, each.found.host_over)
    return 0.0, *_cost(each.found, aim)
