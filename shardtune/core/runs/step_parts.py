"""Where the time of a step went, part by part: what `metrics.jsonl` keeps of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardtune.core.record import Record

PARTS = (
    "data", "transfer", "compute", "communication", "optimizer", "save", "evaluation", "logging",
    "other",
)  # fmt: skip
"""The fields of `RankParts` that are seconds, in the order in which they are drawn."""


class RankParts(Record):
    """Seconds of one rank's step, on average over some steps; their sum is all of its time.

    A CPU's parts are told by its thread's own clock. A GPU's are told by its events, which can't
    see what a collective inside a forward or backward pass waits for: that counts as `compute`
    there, and a profile (`shardtune train --profile`) tells it apart.
    """

    data: float
    """Waiting for the loader."""
    transfer: float
    """Host to device: the GPU waits for a micro-batch that is on its way."""
    compute: float
    """Forward and backward passes."""
    communication: float
    """Waiting for other ranks, or for what they send."""
    optimizer: float
    """Clipping and the update."""
    save: float
    """Holding still for a checkpoint."""
    evaluation: float
    logging: float
    """Writing metrics, traces and the live view."""
    other: float
    """The rest: on a GPU, standing idle until the host has launched something."""
    positions: int
    """Tokens that a step's passes went over, padding included."""
    queued: float = 0.0
    """Of all these seconds, in which other processes had the processor; 0 on a GPU."""
    loading: float = 0.0
    """Beside all that: seconds in which the loader's thread made a step's micro-batches."""
    loading_work: float = 0.0
    """Of these, at work; in the others it waited for the disk."""

    @property
    def total(self) -> float:
        return float(sum(self.seconds()))

    def seconds(self) -> list[float]:
        """In the order of PARTS."""
        return [getattr(self, name) for name in PARTS]


class StepParts(Record):
    """Where the time went on each rank, since the line before that says so."""

    steps: int
    """Steps over which each figure is the average."""
    ranks: tuple[RankParts, ...]
    imbalance: float = 1.0
    """Positions of the rank that had most, over the mean of all ranks, on average."""

    def shares(self) -> dict[str, float]:
        """Each part's share of the time, over all ranks."""
        sums = [sum(column) for column in zip(*(r.seconds() for r in self.ranks), strict=True)]
        whole = sum(sums) or 1.0
        return {name: each / whole for name, each in zip(PARTS, sums, strict=True)}


ACCOUNT = (*PARTS, "queued", "loading", "loading_work", "positions")
"""What ranks tell each other, in this order."""


def mean_parts(sums: Sequence[float], steps: float) -> RankParts:
    """One rank's parts, from sums over some steps in the order of ACCOUNT. Four digits are enough,
    and keep the file small."""
    *seconds, positions = (each / steps for each in sums)
    rounded = (float(f"{each:.4g}") for each in seconds)
    return RankParts(**dict(zip(ACCOUNT, (*rounded, round(positions)), strict=True)))


def total_parts(found: Sequence[StepParts]) -> StepParts:
    """Several accounts as one, each with the weight of its steps."""
    steps = sum(each.steps for each in found)

    def sums(rank: int) -> list[float]:
        rows = [(each.ranks[rank], each.steps) for each in found]
        return [sum(getattr(own, name) * count for own, count in rows) for name in ACCOUNT]

    ranks = min(len(each.ranks) for each in found)
    return StepParts(
        steps=steps,
        ranks=tuple(mean_parts(sums(rank), steps) for rank in range(ranks)),
        imbalance=sum(each.imbalance * each.steps for each in found) / steps,
    )


@dataclass(frozen=True)
class DeviceParts:
    """Seconds of a step by a GPU's own clock."""

    transfer: float
    compute: float
    communication: float
    """Between the passes and the update; with several pipeline stages, between passes too."""
    optimizer: float
