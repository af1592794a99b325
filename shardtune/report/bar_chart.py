"""Bars as inline SVG: stacked ones for where time went, and a histogram of lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardtune.report.chart_scale import short
from shardtune.report.line_chart import SERIES_COLOURS, Drawing, Key, figure
from shardtune.report.markup import Markup, element

_WIDTH, _ROW, _NAME = 760, 26, 74


def draw_stacks(
    title: str, stacks: Mapping[str, Mapping[str, float]], unit: str, order: Sequence[str]
) -> Markup:
    """One bar for each of `stacks`, cut into its parts in the `order`; all in one scale."""
    found = stacks_drawing(title, stacks, unit, order)
    keys = [
        element("li", element("span", class_=f"key c{key.colour % SERIES_COLOURS}"), key.name)
        for key in found.keys
    ]
    legend = element("ul", *keys, class_="legend")
    return figure(found.title, found.words, found.shapes, found.size, legend)


def stacks_drawing(
    title: str,
    stacks: Mapping[str, Mapping[str, float]],
    unit: str,
    order: Sequence[str],
    limit: tuple[str, float] | None = None,
) -> Drawing:
    """The same without its caption and its legend; `limit` is a line across all bars, with its
    name."""
    longest = max((sum(parts.values()) for parts in stacks.values()), default=0.0) or 1.0
    if limit is not None:
        longest = max(longest, limit[1])
    left = max(_NAME, 7 * max(map(len, stacks), default=0) + 12)
    scale = (_WIDTH - left - 90) / longest
    shown = [part for part in order if any(parts.get(part, 0.0) > 0 for parts in stacks.values())]
    shapes: list[Markup] = []
    sums: list[Markup] = []
    for row, (name, parts) in enumerate(stacks.items()):
        top, at = row * _ROW + 4, float(left)
        shapes.append(element("text", name, x=left - 8, y=top + 9, dy="0.35em", class_="y"))
        for part in shown:
            length = parts.get(part, 0.0) * scale
            label = f"{name}, {part}: {short(parts.get(part, 0.0))} {unit}"
            shapes.append(
                element(
                    "rect", element("title", label), x=f"{at:.1f}", y=top, width=f"{length:.1f}",
                    height=_ROW - 8, class_=f"bar c{order.index(part) % SERIES_COLOURS}",
                )
            )  # fmt: skip
            at += length
        whole = f"{short(sum(parts.values()))} {unit}"
        sums.append(
            element("text", whole, x=f"{at + 6:.1f}", y=top + 9, dy="0.35em", class_="value")
        )
    height = len(stacks) * _ROW + 8
    words = " ".join(_stack_words(name, parts, shown, unit) for name, parts in stacks.items())
    if limit is not None:
        place = f"{left + limit[1] * scale:.1f}"
        shapes.append(element("path", d=f"M{place} 0V{height - 4}", class_="level"))
        shapes.append(element("text", limit[0], x=place, y=height + 8, class_="x"))
        words, height = f"{limit[0]}: {short(limit[1])} {unit}. {words}", height + 12
    keys = [Key(part, order.index(part)) for part in shown]
    return Drawing(title, words, [*shapes, *sums], (_WIDTH, height), keys)


def draw_histogram(title: str, counts: Sequence[int], upper: float, unit: str) -> Markup:
    """How values are spread from 0 to `upper`."""
    width, height, left, bottom = 370, 120, 8, 20
    most = max(counts, default=0) or 1
    bar = (width - 2 * left) / max(1, len(counts))
    step = upper / max(1, len(counts))
    shapes: list[str] = []
    for number, count in enumerate(counts):
        tall = count / most * (height - bottom - 8)
        label = f"{short(number * step)} to {short((number + 1) * step)} {unit}: {count:,}"
        shapes.append(
            element(
                "rect", element("title", label), x=f"{left + number * bar:.1f}",
                y=f"{height - bottom - tall:.1f}", width=f"{bar - 1:.1f}", height=f"{tall:.1f}",
                class_="bar c0",
            )
        )  # fmt: skip
    shapes.append(element("text", "0", x=left, y=height - 5))
    shapes.append(
        element("text", f"{short(upper)} {unit}", x=width - left, y=height - 5, class_="x name")
    )
    at = max(range(len(counts)), key=lambda number: counts[number], default=0)
    usual = f"{short(at * step)} to {short((at + 1) * step)} {unit}"
    words = f"Most documents ({most:,}) have {usual}; the longest has {short(upper)}."
    return figure(title, words, shapes, (width, height))


def _stack_words(name: str, parts: Mapping[str, float], shown: Sequence[str], unit: str) -> str:
    whole = sum(parts.values()) or 1.0
    said = ", ".join(
        f"{part} {parts[part] / whole:.0%}" for part in shown if parts.get(part, 0.0) > 0
    )
    return f"{name}: {short(whole)} {unit}, of it {said}."
