"""The diagnosis of a run: what bounds its speed, and what would help."""

from __future__ import annotations

from typing import Literal

from shardtune.core.record import Record

Bound = Literal[
    "compute", "memory", "communication", "data", "host", "save", "evaluation", "logging"
]
SlowCause = Literal[
    "slow_storage", "slow_loader", "communication", "straggler", "imbalance", "small_micro_batch",
    "host", "recomputation", "padding", "save", "evaluation", "logging",
]  # fmt: skip


class Remedy(Record):
    """A change, and what it would save."""

    cause: SlowCause
    fact: str
    """What is lost, and why."""
    change: str
    """As it is written behind a command; empty where it is no value of the job."""
    line: str
    """A command to paste."""
    gain: float
    """The share of the run's time that it is expected to save."""
    by: Literal["planner", "measured"]
    """The planner's forecast, scaled to what was measured; or measured shares alone."""
    same_result: bool = True
    """Whether training gives the same as before."""


class SlowRankFact(Record):
    """A straggler: a rank that takes longer for the same work."""

    rank: int
    times: float
    """Its seconds for a position, over the median of the others."""
    lost: float
    """The share of the time in which others waited for it."""


class ExposedCollective(Record):
    """Communication that nothing hides, by collective."""

    op: str
    share: float
    """Of the time of a step."""
    count: float | None = None
    """Messages in a step; None where only the forecast tells."""
    link: str | None = None
    """Between devices of a node, or between nodes, as the planner has it."""
    measured: bool = True


class SettingFact(Record):
    """A setting of the strategy that decides how communication hides behind computing."""

    key: str
    value: str
    meaning: str


class Diagnosis(Record):
    """What bounds a run, from its metrics, and its profile where it has one."""

    bound: Bound
    healthy: bool
    """Nothing was found that would save a tenth of the time."""
    verdict: str
    """In a sentence."""
    steps: int
    """Steps that were looked at."""
    step_seconds: float
    """Of one, with what a step has a share in: saving, evaluation."""
    shares: dict[Bound, float]
    forecast: dict[Bound, float] | None
    """The same, as it was predicted; None where nothing was."""
    efficiency: float | None
    """FLOP/s of forward and backward passes, over the device's peak; None where it isn't known."""
    causes: tuple[SlowCause, ...]
    """What costs a tenth of the time or more, the most expensive first."""
    remedies: tuple[Remedy, ...]
    """The three largest."""
    stragglers: tuple[SlowRankFact, ...]
    collectives: tuple[ExposedCollective, ...]
    settings: tuple[SettingFact, ...]
    profiled: bool
    """Whether a profile was read; else it is told from the metrics alone, less exactly."""
