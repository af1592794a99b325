"""Which strategy: every candidate is forecast, the best is chosen, and each loser says why.

What is searched never changes the result of training: strategy, degrees, offload, recomputation and
the size of a micro-batch, at a fixed global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from shardtune.config.job import AdamW, Job
from shardtune.config.rules import check
from shardtune.core.model.shape import ModelShape
from shardtune.core.strategy import Choice, Devices
from shardtune.errors import JobError, ModelError
from shardtune.parallel import STRATEGIES, Strategy
from shardtune.plan.auto_micro_batch import (
    ABOUT_AS_FAST,
    BETWEEN,
    SPARE,
    at_level,
    filled,
    has_room,
    levels_of,
    powers,
)
from shardtune.plan.cluster import Cluster
from shardtune.plan.estimate.comms import busy_bytes
from shardtune.plan.explain import Aim, praise_or_blame
from shardtune.plan.forecast import Forecast, forecast


@dataclass(frozen=True)
class Candidate:
    """A strategy with its best settings, or the reason why it is impossible."""

    name: str
    found: Forecast | None
    refused: str = ""
    why: str = ""
    """Why it wins or loses."""

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
    installed_only: bool = False,
) -> Ranking:
    """Every strategy on all GPUs of the cluster, each with the settings that suit it best.

    Where it is to run here, only those of which all packages are installed.
    """
    found = []
    for _, kind in groupby(choices(shape, cluster.devices), key=lambda choice: choice.kind):
        wanted = [
            each
            for each in kind
            if (not installed_only or is_installed(each.strategy))
            and _is_possible(each, job, cluster.gpus)
        ]
        candidates = [_best(each, job, shape, cluster, aim) for each in wanted]
        if candidates:
            found.append(min(candidates, key=lambda each: _order(each, aim)))
    simplest = list(found)
    found.sort(key=lambda each: _order(each, aim))
    if aim != "memory":
        found = _roomiest_first(found, simplest)
    best = found[0].found if found[0].fits else None
    return Ranking(tuple(replace(each, why=_why(each, best, aim)) for each in found), aim)


def may_fit(job: Job, shape: ModelShape, cluster: Cluster) -> bool:
    """Whether some strategy fits with all that can be recomputed and with the fewest rows at a time
    or the most, which may spare a sum of gradients. Where none does no ranking has a best, and this
    is known sooner."""
    for choice in choices(shape, cluster.devices):
        if not _is_possible(choice, job, cluster.gpus):
            continue
        asked, strategy = _prepared(choice, job, cluster)
        sizes = list(powers(_rows(asked, strategy, cluster)))
        for size in {sizes[0], sizes[-1]}:
            leanest = list(_levels(asked, shape, strategy, cluster, size))[-1]
            found = tried(leanest, shape, cluster)
            if isinstance(found, Forecast) and found.fits:
                return True
    return False


def _why(each: Candidate, best: Forecast | None, aim: Aim) -> str:
    if each.found is None:
        return f"can't be had: {each.refused}"
    return praise_or_blame(each.found, best, aim)


# What is tried -----------------------------------------------------------------------------------


def choices(shape: ModelShape, devices: Devices) -> list[Choice]:
    """The strategies worth trying on these devices, the simplest first."""
    found = [each for kind in STRATEGIES.values() for each in kind.candidates(shape, devices)]
    return sorted(found, key=lambda each: each.order)


def is_installed(strategy: Strategy) -> bool:
    """Whether all packages are here that it needs."""
    return all(find_spec(need.package) for need in strategy.capabilities.needs)


def _best(choice: Choice, job: Job, shape: ModelShape, cluster: Cluster, aim: Aim) -> Candidate:
    """The strategy with the micro-batch and the recomputation that suit it best."""
    asked, strategy = _prepared(choice, job, cluster)
    jobs = _variants(asked, shape, strategy, cluster)
    variants = [tried(each, shape, cluster) for each in jobs]
    forecasts = [each for each in variants if isinstance(each, Forecast)]
    if not forecasts:
        refused = next(each for each in variants if isinstance(each, str))
        return Candidate(choice.name, None, refused)
    best = _leading(forecasts, aim)
    return Candidate(choice.name, best if aim == "memory" else filled(best))


def _prepared(choice: Choice, job: Job, cluster: Cluster) -> tuple[Job, Strategy]:
    """What a choice makes of a job, and its strategy with the buckets that suit the cluster."""
    busy = busy_bytes(choice.strategy.mesh(cluster.gpus), cluster)
    return _paged(job) if choice.pages_optimizer else job, choice.strategy.with_buckets(busy)


def _paged(job: Job) -> Job:
    """With optimizer states in host memory that the GPU addresses."""
    rule = job.train.optimizer.model_copy(update={"paged": True})
    return job.model_copy(update={"train": job.train.model_copy(update={"optimizer": rule})})


def planned_value(job: Job, key: str) -> Any:
    """Of a key of the section `train`; None where its optimizer has no such key."""
    value: Any = job.train
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _is_possible(choice: Choice, job: Job, ranks: int) -> bool:
    """Whether it differs from the same without it: paged states are for some jobs alone."""
    if not choice.pages_optimizer:
        return True
    if not isinstance(job.train.optimizer, AdamW):
        return False
    with_strategy = _paged(job).model_copy(update={"strategy": choice.strategy})
    return with_strategy.maps_states_to_host(ranks)


def _leading(forecasts: Sequence[Forecast], aim: Aim) -> Forecast:
    """The fastest with room to spare, or the roomiest of those that are about as fast."""
    first = min(map(_room, forecasts))
    pool = [each for each in forecasts if _room(each) == first]
    if first == NO_ROOM:
        return min(pool, key=lambda each: max(each.over, each.host_over))
    if aim != "memory":
        enough = (1 + ABOUT_AS_FAST) * min(each.speed.step.total for each in pool)
        pool = [each for each in pool if each.speed.step.total <= enough]
    return min(pool, key=lambda each: (each.memory.required, each.speed.step.total))


def _roomiest_first(found: list[Candidate], simplest: list[Candidate]) -> list[Candidate]:
    """The best, which is the simplest of those that are about as fast and as roomy as any."""
    first = found[0].found
    if first is None or not first.fits:
        return found
    enough = (1 + ABOUT_AS_FAST) * first.speed.step.total
    near = [
        (each, each.found)
        for each in simplest
        if each.found is not None
        and _room(each.found) == _room(first)
        and each.found.speed.step.total <= enough
    ]
    least = min(other.memory.required for _, other in near) + SPARE * first.capacity
    best = next(each for each, other in near if other.memory.required <= least)
    return [best, *(each for each in found if each is not best)]


NO_ROOM = 2


def _room(found: Forecast) -> int:
    """0 where enough is left free, 1 where it only fits, and NO_ROOM where it doesn't."""
    return NO_ROOM if not found.fits else int(not has_room(found))


def tried(job: Job, shape: ModelShape, cluster: Cluster) -> Forecast | str:
    """The forecast, or why the job is refused."""
    try:
        check(job, lambda path: ".".join(map(str, path)))
        return forecast(job, shape, cluster)
    except (JobError, ModelError) as error:
        return error.problems[0].fact


def _variants(job: Job, shape: ModelShape, strategy: Strategy, cluster: Cluster) -> Iterator[Job]:
    for size in powers(_rows(job, strategy, cluster)):
        yield from _levels(job, shape, strategy, cluster, size)


def _rows(job: Job, strategy: Strategy, cluster: Cluster) -> int:
    """Of a step, for one rank."""
    return -(-job.train.global_batch // strategy.mesh(cluster.gpus).data_ranks)


def _levels(
    job: Job, shape: ModelShape, strategy: Strategy, cluster: Cluster, micro_batch: int
) -> Iterator[Job]:
    """The job under a strategy, with every level of recomputation; the leanest last."""
    launch = job.launch.with_processes(cluster.gpus)
    fast = strategy.capabilities.compiled_layers
    plain = {} if fast else {"kernels": "eager", "loss": "plain"}
    train = job.train.model_copy(update={"micro_batch": micro_batch, **plain})
    each = job.model_copy(update={"strategy": strategy, "train": train, "launch": launch})
    for level in levels_of(each, shape.kind):
        if level not in BETWEEN or train.kernels == "compiled":
            yield at_level(each, level)


def _order(each: Candidate, aim: Aim) -> tuple[float, ...]:
    """Those with room first; money is time, as the cluster is given."""
    found = each.found
    if found is None:
        return (NO_ROOM + 1,)
    if not found.fits:
        return NO_ROOM, max(found.over, found.host_over)
    memory, time = found.memory.required, found.speed.step.total
    return _room(found), *((memory, time) if aim == "memory" else (time, memory))
