"""What a judge found, by category: a table, a radar plot, a document with every verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from rich.table import Table

from shardtune.evaluation.confidence import Interval, bootstrap, paired_difference
from shardtune.evaluation.judge import Grade, PairVerdict

ALL = "all"
_SIZE, _RADIUS, _BEST = 460, 150, 10.0
_COLOURS = {"before": "#888888", "after": "#3f51b5"}


def by_category(grades: Sequence[Grade], side: str) -> dict[str, list[float]]:
    """Readable grades of one side; those of all categories come last."""
    found: dict[str, list[float]] = {}
    for each in grades:
        if each.side == side and each.score is not None:
            found.setdefault(each.category, []).append(each.score)
    every = [score for scores in found.values() for score in scores]
    return {name: found[name] for name in sorted(found)} | ({ALL: every} if every else {})


def draw_grades(grades: Sequence[Grade]) -> Table:
    """Mean grades from 1 to 10, with bootstrap intervals."""
    sides = [side for side in ("before", "after") if any(each.side == side for each in grades)]
    found = {side: by_category(grades, side) for side in sides}
    table = Table("category", "grades", box=None, pad_edge=False)
    for side in sides:
        table.add_column(side, justify="right")
    if len(sides) == 2:
        table.add_column("change", justify="right")
    for name in found[sides[-1]]:
        cells = [_grade(bootstrap(found[side].get(name, []))) for side in sides]
        if len(sides) == 2:
            cells.append(_change(grades, name))
        table.add_row(name, str(len(found[sides[-1]][name])), *cells)
    return table


def _change(grades: Sequence[Grade], category: str) -> str:
    scores: dict[tuple[str, int], dict[str, float]] = {}
    for each in grades:
        if each.score is not None and category in (ALL, each.category):
            scores.setdefault((each.question, each.turn), {})[each.side] = each.score
    both = [each for each in scores.values() if len(each) == 2]
    if not both:
        return "none"
    found = paired_difference([e["before"] for e in both], [e["after"] for e in both])
    return f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def draw_pairs(verdicts: Sequence[PairVerdict]) -> Table:
    """Wins, ties and losses of the trained model, and its share with ties as halves."""
    table = Table("category", "pairs", "won", "tied", "lost", "share", box=None, pad_edge=False)
    names = [*sorted({each.category for each in verdicts}), ALL]
    for name in names:
        each = [v.winner for v in verdicts if name in (ALL, v.category)]
        count = Counter(each)
        share = bootstrap([{"after": 1.0, "tie": 0.5, "before": 0.0}[winner] for winner in each])
        table.add_row(
            name, str(len(each)), str(count["after"]), str(count["tie"]), str(count["before"]),
            f"{share.mean:.1%} [{share.low:.1%}, {share.high:.1%}]",
        )  # fmt: skip
    return table


def _grade(found: Interval) -> str:
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]" if found.rows else "none"


def radar(series: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG of mean grades: an axis for each category, a line for each side."""
    names = sorted({name for values in series.values() for name in values if name != ALL})
    middle = _SIZE / 2

    def point(index: int, share: float) -> tuple[float, float]:
        angle = 2 * math.pi * index / max(len(names), 1) - math.pi / 2
        reach = _RADIUS * share
        return middle + reach * math.cos(angle), middle + reach * math.sin(angle)

    def outline(shares: Sequence[float]) -> str:
        corners = (point(index, share) for index, share in enumerate(shares))
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {_SIZE}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>Mean grade by category</title>",
        f'<rect width="{_SIZE}" height="{_SIZE}" fill="white"/>',
    ]
    for ring in (2, 4, 6, 8, 10):
        corners = outline([ring / _BEST] * len(names))
        parts.append(f'<polygon points="{corners}" fill="none" stroke="#dddddd"/>')
        x, y = point(0, ring / _BEST)
        parts.append(f'<text x="{x + 3:.1f}" y="{y:.1f}" fill="#777777">{ring}</text>')
    for index, name in enumerate(names):
        x, y = point(index, 1.14)
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(name)}</text>')
    for line, (side, values) in enumerate(series.items()):
        colour = _COLOURS.get(side, "#000000")
        corners = outline([values.get(name, 0.0) / _BEST for name in names])
        parts.append(
            f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.15" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        parts.append(f'<text x="12" y="{20 + 16 * line}" fill="{colour}">{escape(side)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
