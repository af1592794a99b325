"""A run's time, measured: which share of it went where, and how that is known."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardtune.config.job import Job
from shardtune.core.runs.diagnosis import Bound, SlowRankFact
from shardtune.core.runs.rank_profile import RankProfile
from shardtune.core.runs.step_parts import StepParts
from shardtune.plan.forecast import Forecast

SLOW_RANK = 1.25
"""A straggler takes so many times as long as the others for a position."""
HOST_BOUND = 5.0
"""Passes that take so many times as long as their FLOPs are not bound by them, but by the host."""
CPU_EFFICIENCY = 0.4
"""Of a core's peak, what passes of a model that is large enough reach."""


@dataclass(frozen=True)
class RunFacts:
    """What a run directory tells a diagnosis."""

    directory: str
    job: Job
    parts: StepParts
    """Of all steps after the first ones."""
    tokens: float
    """Of a step, padding not counted, over all ranks."""
    slow_ranks: Mapping[int, float]
    """Those that the launcher saw: their time in a phase, over that of the others."""
    profiles: tuple[RankProfile, ...] = ()
    predicted: Mapping[str, float] | None = None
    """Seconds of a step by part, as they were forecast for this run."""
    task_seconds: Mapping[str, float] = field(default_factory=dict)
    """Of a step, what each task of `evaluate.tasks` took in training."""
    steps: int | None = None
    """How many the run has in all; None where that isn't known."""

    @property
    def job_file(self) -> str:
        """As it stands in a command."""
        return shlex.quote(f"{self.directory}/job.yaml")

    @property
    def elsewhere(self) -> str:
        """For a run beside it."""
        return shlex.quote(f"save.directory={self.directory}-faster")


@dataclass(frozen=True)
class RunDevice:
    """What the ranks computed on, as far as it is known."""

    forecast: Forecast | None
    """Of the job on it."""
    peak: float | None
    """FLOP/s of one rank."""
    is_gpu: bool


@dataclass(frozen=True)
class MeasuredRun:
    """A run, and where its time went."""

    run: RunFacts
    device: RunDevice

    @cached_property
    def total(self) -> float:
        """Seconds of a step, on average over the ranks, with its share of what is between steps."""
        ranks = self.run.parts.ranks
        return sum(rank.total for rank in ranks) / len(ranks)

    @cached_property
    def part(self) -> dict[str, float]:
        """Each part's share of the time."""
        return self.run.parts.shares()

    @cached_property
    def positions(self) -> float:
        """Of a rank in a step."""
        ranks = self.run.parts.ranks
        return sum(rank.positions for rank in ranks) / len(ranks)

    @property
    def data_ranks(self) -> int:
        """Ranks that have rows of their own."""
        job = self.run.job
        return job.strategy.mesh(int(job.launch.processes)).data_ranks

    @cached_property
    def shares(self) -> dict[Bound, float]:
        """The time by what bounds it."""
        part = self.part
        passes = part["compute"]
        host = self._host_share(passes)
        memory = self._memory_share(passes - host) + part["optimizer"]
        exposed = self._exposed_on_gpu(passes - host)
        return {
            "compute": max(0.0, passes - host - exposed - memory + part["optimizer"]),
            "memory": memory,
            "communication": part["communication"] + exposed,
            "data": part["data"] + part["transfer"],
            "host": host + part["other"],
            "save": part["save"],
            "evaluation": part["evaluation"],
            "logging": part["logging"],
        }

    def _host_share(self, passes: float) -> float:
        """Of passes that take many times as long as their FLOPs, all but these: the host can't
        launch small operations any faster. A GPU's profile tells it exactly."""
        gpus = [each for each in self.run.profiles if each.on_gpu]
        if gpus:
            idle = statistics.fmean(each.idle / each.seconds for each in gpus)
            return min(passes, max(0.0, idle - self.part["data"] - self.part["other"]))
        needed, own = self._needed_seconds(), passes - self.queued
        if needed is None or own * self.total < HOST_BOUND * needed:
            return 0.0
        return passes * (1 - needed / (own * self.total))

    @property
    def queued(self) -> float:
        """The share of the time in which other processes had the processor."""
        ranks = self.run.parts.ranks
        return sum(rank.queued for rank in ranks) / len(ranks) / self.total

    def _needed_seconds(self) -> float | None:
        """Of a rank's passes, if only their FLOPs took time."""
        found = self.device.forecast
        if found is None:
            return None
        tokens = found.speed.tokens / max(1, found.mesh.data_ranks)
        if self.device.is_gpu:
            return found.speed.step.compute * self.positions / tokens
        if self.device.peak is None:
            return None
        flops = self._flops(found)
        return flops / (self.device.peak * CPU_EFFICIENCY)

    def _flops(self, found: Forecast) -> float:
        """Of a rank's passes in a step, what is computed again included."""
        own = found.speed.flops / found.speed.tokens * self.positions
        own *= found.mesh.data_ranks / found.mesh.size
        return own * (4 / 3 if found.work.checkpointing == "full" else 1.0)

    def efficiency(self) -> float | None:
        """FLOP/s of the passes over the device's peak."""
        found = self.device.forecast
        passes = (self.part["compute"] - self.queued) * self.total
        if found is None or self.device.peak is None or passes <= 0:
            return None
        return self._flops(found) / passes / self.device.peak

    def _memory_share(self, passes: float) -> float:
        """Of the passes, operations that are bound by memory: a profile tells."""
        computed = [
            (each.memory, each.matmul + each.attention + each.memory) for each in self.run.profiles
        ]
        whole = sum(each for _, each in computed)
        return passes * sum(each for each, _ in computed) / whole if whole else 0.0

    def _exposed_on_gpu(self, passes: float) -> float:
        """Communication inside a GPU's passes, which only a profile sees."""
        gpus = [each for each in self.run.profiles if each.on_gpu]
        if not gpus:
            return 0.0
        exposed = statistics.fmean(each.exposed / each.seconds for each in gpus)
        return min(passes, max(0.0, exposed - self.part["communication"]))

    def predicted_shares(self) -> dict[Bound, float] | None:
        """The same as `shares`, as it was forecast for this run."""
        told = self.run.predicted
        if not told or not (whole := sum(told.values())):
            return None
        places: dict[str, Bound] = {
            "compute": "compute", "communication": "communication", "optimizer": "memory",
            "offload": "memory", "bubble": "communication", "data": "data",
        }  # fmt: skip
        found: dict[Bound, float] = {}
        for name, seconds in told.items():
            place = places.get(name, "host")
            found[place] = found.get(place, 0.0) + seconds / whole
        return found

    def stragglers(self) -> tuple[SlowRankFact, ...]:
        """Ranks that take longer for the same work, the slowest first."""
        ranks = self.run.parts.ranks
        if len(ranks) < 2:
            return ()
        rates = [rank.compute / max(1, rank.positions) for rank in ranks]
        found = []
        for number, rate in enumerate(rates):
            others = statistics.median(rates[:number] + rates[number + 1 :])
            times = rate / others if others else 1.0
            told = self.run.slow_ranks.get(number, 0.0)
            if times > SLOW_RANK or told > SLOW_RANK:
                waits = [
                    each.communication / each.total for n, each in enumerate(ranks) if n != number
                ]
                times = max(times, told)
                lost = statistics.fmean(waits) * min(1.0, times - 1)
                found.append(SlowRankFact(rank=number, times=round(times, 2), lost=lost))
        return tuple(sorted(found, key=lambda each: -each.times))


def without_outliers(found: Sequence[StepParts]) -> list[StepParts]:
    """Accounts without those of a moment in which something else happened: a profile was written,
    a machine slept."""
    if len(found) < 3:
        return list(found)
    totals = [sum(rank.total for rank in each.ranks) for each in found]
    usual = statistics.median(totals)
    return [each for each, total in zip(found, totals, strict=True) if total <= 5 * usual]
