"""Where the time of a step went, as bars: one for each rank, beside the forecast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from shardtune.core.runs.run_history import RunHistory
from shardtune.core.runs.step_parts import PARTS, StepParts
from shardtune.report.bar_chart import draw_stacks
from shardtune.report.markup import Markup, element, join

MOST_RANKS = 32
_OF_FORECAST = {"bubble": "communication", "offload": "transfer"}
"""Parts of a forecast that a run can't tell from others."""


def step_bars(run: RunHistory) -> str:
    """The picture; a sentence where only the busy share is known, and nothing without either."""
    found = [(step.parts, step.parts.steps) for step in run.steps if step.parts is not None]
    if not found:
        return _busy(run)
    ranks = _means(found)
    bars: dict[str, Mapping[str, float]] = {}
    if run.forecast is not None and run.environment is not None and run.environment.gpus:
        bars["forecast"] = _forecast(run.forecast.parts)
    bars |= {f"rank {number}": parts for number, parts in list(ranks.items())[:MOST_RANKS]}
    left = len(ranks) - MOST_RANKS
    note = [element("p", f"{left} more ranks are not drawn.", class_="soft")] if left > 0 else []
    return join([draw_stacks("Seconds of a step, by rank", bars, "s", PARTS), *note])


def _means(found: list[tuple[StepParts, int]]) -> dict[int, dict[str, float]]:
    """Each rank's mean over the steps that it took part in: a resumed run may have fewer ranks."""
    sums: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PARTS, 0.0))
    steps: dict[int, int] = defaultdict(int)
    for parts, count in found:
        for number, rank in enumerate(parts.ranks):
            steps[number] += count
            for name, seconds in zip(PARTS, rank.seconds(), strict=True):
                sums[number][name] += seconds * count
    return {
        number: {name: seconds / (steps[number] or 1) for name, seconds in own.items()}
        for number, own in sums.items()
    }


def _forecast(parts: Mapping[str, float]) -> dict[str, float]:
    known: dict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        known[_OF_FORECAST.get(name, name)] += seconds
    return dict(known)


def _busy(run: RunHistory) -> str:
    known = [step.utilisation for step in run.steps if step.utilisation is not None]
    if not known:
        return Markup("")
    share = known[-1]
    words = f"At the end the ranks computed {share:.0%} of the time, and waited for the rest."
    return element("p", words)
