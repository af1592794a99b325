"""What would make a run faster: changes that the planner tries, scaled to what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from shardtune.config.job import Job, NoAdapter
from shardtune.core.runs.diagnosis import SlowCause
from shardtune.plan.auto_micro_batch import at_level, levels_of
from shardtune.plan.forecast import Forecast
from shardtune.plan.remedies import Setting, in_words, overrides
from shardtune.plan.search import rank, tried

WORTH_SENDING = 0.1
"""Share of the time that communication takes before other strategies are tried."""


@dataclass(frozen=True)
class MeasuredTime:
    """Shares of a run's time that a change of the job can scale."""

    compute: float
    communication: float
    optimizer: float


@dataclass(frozen=True)
class Speedup:
    """A change, and the share of the time that it is expected to save."""

    cause: SlowCause
    fact: str
    change: str
    gain: float
    same_result: bool = True


def speedups(found: Forecast, measured: MeasuredTime) -> Iterator[Speedup]:
    """Changes that fit and are expected to save time."""
    yield from _less_recomputation(found, measured)
    if measured.communication >= WORTH_SENDING:
        yield from _another_strategy(found, measured)
        yield from _rarer_meetings(found, measured)
        yield from _less_to_send(found, measured)


def _less_recomputation(found: Forecast, measured: MeasuredTime) -> Iterator[Speedup]:
    """The fastest level of activation checkpointing that fits."""
    level = found.work.checkpointing
    for other in levels_of(found.job, found.shape.kind):
        if other == level:
            return
        new = tried(at_level(found.job, other), found.shape, found.cluster)
        if isinstance(new, Forecast) and new.fits:
            gain = saved(found, new, measured)
            fact = f"`{level}` recomputes activations, and `{other}` fits into memory"
            yield Speedup("recomputation", fact, f"train.gradient_checkpointing={other}", gain)
            return


def _another_strategy(found: Forecast, measured: MeasuredTime) -> Iterator[Speedup]:
    best = rank(found.job, found.shape, found.cluster, installed_only=True).best
    if best is None or best.found is None:
        return
    values = overrides(found.job, best.found.job)
    if not values or best.found.job.strategy == found.job.strategy:
        return
    gain = saved(found, best.found, measured)
    fact = f"{best.name} {best.why}"
    yield Speedup("communication", fact, in_words(values), gain)


def _rarer_meetings(found: Forecast, measured: MeasuredTime) -> Iterator[Speedup]:
    """Four times the rows a step: what is sent once a step is sent a quarter as often."""
    rows = 4 * found.job.train.global_batch
    values: dict[str, Setting] = {"train.global_batch": rows}
    yield from _tried_with(
        found, measured, values, "gradient accumulation: a quarter of the synchronisations"
    )


def _less_to_send(found: Forecast, measured: MeasuredTime) -> Iterator[Speedup]:
    if isinstance(found.job.adapter, NoAdapter):
        values: dict[str, Setting] = {"adapter.type": "lora"}
        yield from _tried_with(found, measured, values, "LoRA sends the adapter's gradients only")


def _tried_with(
    found: Forecast, measured: MeasuredTime, values: dict[str, Setting], fact: str
) -> Iterator[Speedup]:
    job = _with(found.job, values)
    new = tried(job, found.shape, found.cluster)
    if isinstance(new, Forecast) and new.fits:
        gain = saved(found, new, measured)
        yield Speedup("communication", fact, in_words(values), gain, same_result=False)


def _with(job: Job, values: dict[str, Setting]) -> Job:
    document = job.model_dump(mode="json")
    for key, value in values.items():
        section, name = key.split(".")
        if name == "type":
            document[section] = {"type": value}
        else:
            document[section][name] = value
    return Job.model_validate_json(json.dumps(document))


def saved(old: Forecast, new: Forecast, measured: MeasuredTime) -> float:
    """The share of the time for the same tokens that is saved: each measured part scaled as the
    planner's is. Parts that the planner doesn't know stay as they are."""
    rows = old.speed.tokens / new.speed.tokens
    before, after = old.speed.step, new.speed.step
    gone = known = known_share = 0.0
    for name in ("compute", "communication", "optimizer"):
        was, becomes = getattr(before, name), getattr(after, name) * rows
        if was:
            gone += getattr(measured, name) * (1 - becomes / was)
            known += was
            known_share += getattr(measured, name)
    # Bubbles and offload come with a strategy, and were not measured in a run without them.
    more = rows * (after.bubble + after.offload) - before.bubble - before.offload
    return gone - (more * known_share / known if known else 0.0)
