"""Records where each step's time went on this rank, and puts the ranks' accounts together.

Nothing is measured for it that the heartbeat and the GPU's events don't tell anyway; ranks exchange
their accounts in the collective in which they compare how busy they were.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardtune.config.job import Job
from shardtune.core.host.heartbeat import PHASES
from shardtune.core.phase_clock import PhaseClock
from shardtune.core.runs.step_parts import ACCOUNT, PARTS, RankParts, StepParts, mean_parts
from shardtune.core.step import MicroBatch, StepResult
from shardtune.core.world import World
from shardtune.data.loader import LoadingTime

RANKS_PER_SECOND = 16
"""Accounts of so many ranks are written in a second at most: each takes 200 bytes."""


class PartRecorder:
    """One rank's account of its steps."""

    def __init__(self, job: Job, world: World) -> None:
        self._alone = world.size == 1
        self._on_gpu = world.device != "cpu"
        self._forward_waits = not self._alone and _waits_in_forward(job, world.size)
        self._heartbeat = world.heartbeat
        self._clock = self._heartbeat.clock = PhaseClock(PHASES, splits=not self._on_gpu)
        self._positions = 0
        self._loaded = LoadingTime()
        self._steps, self._sums = 0, [[0.0] * len(ACCOUNT) for _ in range(world.size)]
        self._imbalance = 0.0
        self._interval = max(1.0, world.size / RANKS_PER_SECOND)
        self._written = 0.0

    def close(self) -> None:
        """No step follows."""
        self._heartbeat.clock = None
        self._clock.close()

    def count(self, microbatches: Sequence[MicroBatch]) -> None:
        """The micro-batches of a step."""
        self._positions += sum(batch.input_ids.numel() for batch in microbatches)

    def take(self, results: Sequence[StepResult], loaded: LoadingTime) -> list[float]:
        """This rank's account since the last time, in the order of ACCOUNT. `results` are of the
        steps that were read meanwhile, `loaded` is what the loader has spent so far."""
        positions, self._positions = float(self._positions), 0
        before, self._loaded = self._loaded, loaded
        parts = self._parts_of_gpu(results) if self._on_gpu else self._parts_of_cpu()
        loading = loaded.seconds - before.seconds, loaded.worked - before.worked
        queued = self._clock.take_queued()
        return [*(parts[name] for name in PARTS), queued, *loading, positions]

    def _parts_of_cpu(self) -> dict[str, float]:
        spent, worked = self._clock.take()
        if self._alone:  # there is nobody to wait for
            worked = spent
        waited = {phase: spent[phase] - worked[phase] for phase in spent}
        forward = worked["forward"] if self._forward_waits else spent["forward"]
        between = spent["collective"] if self._alone else 0.0
        return _named(
            spent,
            transfer=0.0,
            compute=forward + worked["backward"],
            communication=(
                spent["collective"]
                - between
                + waited["backward"]
                + waited["update"]
                + spent["forward"]
                - forward
            ),
            optimizer=worked["update"],
            other=between + spent["compile"] + spent["start"] + spent["finish"],
        )

    def _parts_of_gpu(self, results: Sequence[StepResult]) -> dict[str, float]:
        """What a GPU did by its own clock. While it stood still the host waited for data, did what
        only it can do, or wasn't quick enough."""
        spent, _ = self._clock.take()
        told = [each.on_device for each in results if each.on_device is not None]
        busy = {
            name: sum(getattr(each, name) for each in told)
            for name in ("transfer", "compute", "communication", "optimizer")
        }
        whole = sum(each.since_last or 0.0 for each in results) or sum(spent.values())
        beside = sum(spent[phase] for phase in ("save", "evaluate"))
        idle = max(0.0, whole - sum(busy.values()) - beside)
        data = min(idle, spent["data"])
        log = min(idle - data, spent["log"])
        found = _named(spent, **busy, other=idle - data - log)
        return {**found, "data": data, "logging": log}

    def put_together(self, accounts: Sequence[Sequence[float]], steps: int) -> StepParts | None:
        """Adds each rank's account of some steps; all since the last time, when it is time."""
        self._steps += steps
        mine = [account[-1] for account in accounts]
        self._imbalance += steps * (max(mine) * len(mine) / sum(mine) if sum(mine) else 1.0)
        for sums, account in zip(self._sums, accounts, strict=True):
            for place, seconds in enumerate(account):
                sums[place] += seconds
        now = time.monotonic()
        if not self._steps or now - self._written < self._interval:
            return None
        imbalance = round(self._imbalance / self._steps, 4)
        found = StepParts(steps=self._steps, ranks=self._means(), imbalance=imbalance)
        self._written, self._steps, self._imbalance = now, 0, 0.0
        self._sums = [[0.0] * len(sums) for sums in self._sums]
        return found

    def _means(self) -> tuple[RankParts, ...]:
        return tuple(mean_parts(sums, self._steps) for sums in self._sums)


def _named(
    spent: dict[str, float],
    *,
    transfer: float,
    compute: float,
    communication: float,
    optimizer: float,
    other: float,
) -> dict[str, float]:
    return {
        "data": spent["data"],
        "transfer": transfer,
        "compute": compute,
        "communication": communication,
        "optimizer": optimizer,
        "save": spent["save"],
        "evaluation": spent["evaluate"],
        "logging": spent["log"],
        "other": other,
    }


def _waits_in_forward(job: Job, ranks: int) -> bool:
    """Whether the strategy declares collectives in a forward pass: of anything but gradients."""
    moves = job.layout(ranks).moves(job.strategy.mesh(ranks))
    gradients = ("grads", "unsliced", "tied")
    return any(move.when == "micro_batch" and move.what not in gradients for _, move in moves)
