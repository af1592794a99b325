"""Pictures of forecasts: a sweep as stacked areas, a ranking as bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from shardtune.core.units import GIB
from shardtune.plan.forecast import Forecast
from shardtune.plan.search import Ranking
from shardtune.plan.sweep import Sweep, SweepPoint
from shardtune.report.bar_chart import stacks_drawing
from shardtune.report.line_chart import (
    SERIES_COLOURS,
    Band,
    Chart,
    Drawing,
    ForecastLevel,
    Line,
    chart_drawing,
)

MEMORY_CLASSES = (
    "params",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "overhead",
)
DRAWN_ABOVE = 2.0
"""Times a card's memory; what is above isn't drawn: what fits would not be seen."""
STEP_PARTS = ("compute", "communication", "optimizer", "offload", "bubble", "data")


def classes_of(found: Forecast) -> dict[str, float]:
    """GiB that must fit, by class; what the allocator would give back doesn't count."""
    memory = found.memory
    sizes: dict[str, float] = {name: size / GIB for name, size in memory.gpu.items()}
    return sizes | {"overhead": (memory.fragmentation + memory.context) / GIB}


def parts_of(found: Forecast) -> dict[str, float]:
    """Seconds of a step, by part."""
    return {name: getattr(found.speed.step, name) for name in STEP_PARTS}


def sweep_drawings(swept: Sweep) -> tuple[list[Drawing], list[str]]:
    """Memory by class over the last key, a picture for each choice of the others; then tokens a
    second of all. Also what was refused, in words."""
    *others, last = swept.keys
    labels = last.values
    drawings, speeds = [], []
    for number, (choice, points) in enumerate(_by_choice(swept.points)):
        named = ", ".join(f"{each.key}={value}" for each, value in zip(others, choice, strict=True))
        found = [(labels.index(p.values[-1]), p.found) for p in points if p.found is not None]
        if not found:
            continue
        drawings.append(_memory(named, last.key, labels, found))
        rates = [(float(x), each.speed.tokens_per_second) for x, each in found if each.fits]
        again = number >= SERIES_COLOURS  # the colours begin anew
        speeds.append(Line(named or "tokens a second", rates, number, dots=True, dashed=again))
    chart = Chart(
        "Tokens a second, where it fits", last.key, "tokens/s", speeds, wide=True, from_zero=True,
        x_labels=labels,
    )  # fmt: skip
    refused = dict.fromkeys(each.refused for each in swept.points if each.refused)
    return [*drawings, chart_drawing(chart)], [f"refused: {each}" for each in refused]


def _by_choice(points: Sequence[SweepPoint]) -> Iterator[tuple[tuple[str, ...], list[SweepPoint]]]:
    for choice, group in groupby(points, key=lambda point: point.values[:-1]):
        yield choice, list(group)


def _memory(
    named: str, key: str, labels: Sequence[str], found: Sequence[tuple[int, Forecast]]
) -> Drawing:
    first = found[0][1]
    most = DRAWN_ABOVE * first.capacity / GIB
    bands, below = [], [0.0] * len(found)
    sizes = [classes_of(each) for _, each in found]
    for colour, name in enumerate(MEMORY_CLASSES):
        above = [min(most, low + each[name]) for low, each in zip(below, sizes, strict=True)]
        if above != below:
            places = [float(x) for x, _ in found]
            bands.append(Band(name, list(zip(places, below, above, strict=True)), colour, True))
        below = above
    limit = ForecastLevel(
        f"{first.cluster.gpu.name}: {first.capacity / GIB:.0f} GiB", first.capacity / GIB
    )
    needed = [(float(x), min(most, each.memory.required / GIB)) for x, each in found]
    cut = any(each.memory.required / GIB > most for _, each in found)
    title = ", ".join(
        ["GiB on a GPU", *([named] if named else []), *([f"cut off at {most:.0f}"] if cut else [])]
    )
    chart = Chart(
        title, key, "GiB",
        [Line("required", needed, 7, dots=True)], bands, levels=[limit], wide=True,
        from_zero=True, x_labels=labels,
    )  # fmt: skip
    return chart_drawing(chart)


def ranking_drawings(ranking: Ranking) -> tuple[list[Drawing], list[str]]:
    """A bar for each strategy: memory by class beside what a card has, and the step by part of
    those that fit. Also where each lost, in words."""
    tried = [(each, each.found) for each in ranking.candidates if each.found is not None]
    notes = [f"{each.name}: {each.why}" for each in ranking.candidates]
    if not tried:
        return [], notes
    first = tried[0][1]
    limit = (f"{first.cluster.gpu.name}: {first.capacity / GIB:.0f} GiB", first.capacity / GIB)
    memory = {each.name: classes_of(found) for each, found in tried}
    drawings = [stacks_drawing("Memory of a GPU", memory, "GiB", MEMORY_CLASSES, limit)]
    times = {each.name: parts_of(found) for each, found in tried if each.fits}
    if times:
        drawings.append(stacks_drawing("A step, of those that fit", times, "s", STEP_PARTS))
    return drawings, notes
