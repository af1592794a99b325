"""Which strategy: every candidate is forecast, the best is chosen, and each loser says why.

What is searched never changes the result of training: strategy, degrees, offload, recomputation and
the size of a micro-batch, at a fixed global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from typing import Literal

from shardtune.config.job import Job
from shardtune.config.rules import check
from shardtune.core.model.shape import ModelShape
from shardtune.core.strategy import Choice, Devices
from shardtune.errors import JobError, ModelError
from shardtune.parallel import STRATEGIES, Strategy
from shardtune.plan.auto_micro_batch import BETWEEN, at_level, filled, levels_of, powers
from shardtune.plan.cluster import Cluster
from shardtune.plan.explain import ALIKE, praise_or_blame
from shardtune.plan.forecast import Forecast, forecast

Aim = Literal["time", "cost", "memory"]


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
    installed_only: bool = False,
) -> Ranking:
    """Every strategy on all GPUs of the cluster, each with the settings that suit it best.

    Where it is to run here, only those of which all packages are installed.
    """
    found = []
    for _, kind in groupby(choices(shape, cluster.devices), key=lambda choice: choice.kind):
        wanted = [each for each in kind if not installed_only or is_installed(each.strategy)]
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


def choices(shape: ModelShape, devices: Devices) -> list[Choice]:
    """The strategies worth trying on these devices, the simplest first."""
    found = [each for kind in STRATEGIES.values() for each in kind.candidates(shape, devices)]
    return sorted(found, key=lambda each: each.order)


def is_installed(strategy: Strategy) -> bool:
    """Whether all packages are here that it needs."""
    return all(find_spec(need.package) for need in strategy.capabilities.needs)


def _best(choice: Choice, job: Job, shape: ModelShape, cluster: Cluster, aim: Aim) -> Candidate:
    """The strategy with the micro-batch and the recomputation that suit it best."""
    jobs = _variants(job, shape, choice.strategy, cluster)
    variants = [tried(each, shape, cluster) for each in jobs]
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


def _variants(job: Job, shape: ModelShape, strategy: Strategy, cluster: Cluster) -> Iterator[Job]:
    launch = job.launch.with_processes(cluster.gpus)
    rows = -(-job.train.global_batch // strategy.mesh(cluster.gpus).data_ranks)
    fast = strategy.capabilities.compiled_layers
    plain = {} if fast else {"kernels": "eager", "loss": "plain"}
    for micro in powers(rows):
        train = job.train.model_copy(update={"micro_batch": micro, **plain})
        each = job.model_copy(update={"strategy": strategy, "train": train, "launch": launch})
        for level in levels_of(each, shape.kind):
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
