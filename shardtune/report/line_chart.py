"""Line charts as inline SVG, with a title, a text alternative, and their values for hovering."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardtune.report.chart_scale import ChartScale, bounds, round_ticks, short
from shardtune.report.markup import Markup, element, plain

SERIES_COLOURS = 9  # that the style sheet has
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 34
LABEL_RIGHT = 30  # room for half of the last label
HALF_LETTER = 3.3


@dataclass(frozen=True)
class Line:
    """One series, thinned by whoever draws it."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    faint: bool = False
    """Drawn thin, behind the others: what was measured, under what was smoothed."""
    dots: bool = False
    """With a dot at each point, where they are few."""
    dashed: bool = False
    """So that a line which lies on another shows it, and colours aren't all that tells them."""


@dataclass(frozen=True)
class Band:
    """What lies between two curves, as (x, low, high)."""

    name: str
    points: Sequence[tuple[float, float, float]]
    colour: int = 0
    solid: bool = False
    """For areas that are stacked; what shows how far values spread lies under their line."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at one place of the x axis."""

    x: float
    name: str
    kind: str = "event"
    """`event`, `save`, `warning` or `fault`: the style sheet colours them."""


@dataclass(frozen=True)
class ForecastLevel:
    """One value for all of the x axis, such as a forecast."""

    name: str
    y: float


@dataclass(frozen=True)
class Chart:
    """What to draw."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    levels: Sequence[ForecastLevel] = ()
    wide: bool = False
    from_zero: bool = False
    x_labels: Sequence[str] = ()
    """What stands at 0, 1, 2 and so on, where values of the x axis are names, or double."""
    x_range: tuple[float, float] | None = None
    """What the x axis shows at least, also where nothing is drawn."""
    y_most: float | None = None
    """Where lines are cut off at the top."""
    note: str = ""
    """Beside the legend, and at the end of the words."""
    mark_names: Mapping[str, str] = field(default_factory=dict)
    """What the legend calls the kinds of marks, where it isn't the kind's own name."""

    def label(self, x: float) -> str:
        """How a place of the x axis is called."""
        return self.x_labels[round(x)] if self.x_labels else short(x)

    @property
    def size(self) -> tuple[int, int]:
        return (760, 300) if self.wide else (370, 190)


@dataclass(frozen=True)
class Key:
    """What a legend says of a line or an area."""

    name: str
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Drawing:
    """Shapes with a title, with words for those who don't see them, and the keys to colours."""

    title: str
    words: str
    shapes: Sequence[Markup]
    size: tuple[int, int]
    keys: Sequence[Key] = ()


def draw_chart(chart: Chart) -> Markup:
    """A figure with its caption and its legend. One without a point says so."""
    found = chart_drawing(chart)
    return figure(found.title, found.words, found.shapes, found.size, _legend(chart))


def chart_drawing(chart: Chart) -> Drawing:
    """The chart without its caption and its legend."""
    width, height = chart.size
    if not any(line.points for line in chart.lines):
        nothing = element("text", "no values", x=width / 2, y=height / 2, class_="none")
        return Drawing(chart.title, describe(chart), [nothing], (width, height))
    across, up = _scales(chart)
    shapes = [
        *_axes(chart, across, up),
        *(_band(band, across, up) for band in chart.bands),
        *(_mark(mark, chart.x_name, across, height) for mark in chart.marks),
        *(_level(level, up, width, any(b.solid for b in chart.bands)) for level in chart.levels),
        *(_line(line, across, up) for line in chart.lines if line.points),
    ]
    return Drawing(chart.title, describe(chart), shapes, (width, height), _series(chart))


def figure(
    title: str, words: str, shapes: Sequence[str], size: tuple[int, int], legend: str = ""
) -> Markup:
    """An SVG picture with a caption, and with `words` for those who don't see it."""
    name = "f" + hashlib.sha256(plain(f"{title}\n{words}").encode()).hexdigest()[:10]
    width, height = size
    svg = element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", words, id=f"{name}-desc"),
        *shapes,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
    holder = element("div", svg, class_="wide plot" if width > 400 else "plot")
    parts = [element("figcaption", title), holder, *([legend] if legend else [])]
    return element("figure", *parts, class_="large" if width > 400 else None)


def describe(chart: Chart) -> str:
    """The chart in words: where each line begins and ends, and its extremes."""
    said = [_words(line, chart) for line in chart.lines if line.points and not line.faint]
    said += [f"{level.name}: {short(level.y)}." for level in chart.levels]
    said += [f"At {chart.x_name} {short(mark.x)}: {mark.name}." for mark in chart.marks[:12]]
    said += [f"{chart.note}."] if chart.note else []
    return " ".join(said) or "There are no values."


def _words(line: Line, chart: Chart) -> str:
    (first_x, first), (last_x, last) = line.points[0], line.points[-1]
    x_name, label = chart.x_name, chart.label
    if len(line.points) == 1:
        return f"{line.name}: {short(first)} at {x_name} {label(first_x)}."
    low_x, low = min(line.points, key=lambda point: point[1])
    high_x, high = max(line.points, key=lambda point: point[1])
    return (
        f"{line.name}: from {short(first)} at {x_name} {label(first_x)} to {short(last)} at "
        f"{label(last_x)}; lowest {short(low)} at {label(low_x)}, highest {short(high)} at "
        f"{label(high_x)}."
    )


def _scales(chart: Chart) -> tuple[ChartScale, ChartScale]:
    width, height = chart.size
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    ys += [y for band in chart.bands for _, low, high in band.points for y in (low, high)]
    ys += [level.y for level in chart.levels]
    if chart.y_most is not None:
        ys = [min(y, chart.y_most) for y in ys]
    low, high = min([*xs, *(chart.x_range or ())]), max([*xs, *(chart.x_range or ())])
    if chart.x_labels:
        low, high = 0.0, len(chart.x_labels) - 1.0
    if low == high:  # one place alone, in the middle
        low, high = low - 0.5, high + 0.5
    bottom, top = bounds(ys, from_zero=chart.from_zero)
    right = width - (LABEL_RIGHT if chart.x_labels else RIGHT)
    across = ChartScale(low, high, LEFT, right)
    return across, ChartScale(bottom, top, height - BOTTOM, TOP)


def _axes(chart: Chart, across: ChartScale, up: ChartScale) -> list[Markup]:
    width, height = chart.size
    shapes = []
    for tick in round_ticks(up.low, up.high):
        y = f"{up.at(tick):.1f}"
        shapes.append(element("path", d=f"M{LEFT} {y}H{width - RIGHT}", class_="grid"))
        shapes.append(element("text", short(tick), x=LEFT - 6, y=y, dy="0.32em", class_="y"))
    places = round_ticks(across.low, across.high, about=width // 90, whole=True)
    if chart.x_labels:
        places = [float(number) for number in range(len(chart.x_labels))]
    for tick in places:
        place, name = across.at(tick), chart.label(tick)
        beyond = place + HALF_LETTER * len(name) > width
        x, style = (f"{width}", "x name") if beyond else (f"{place:.1f}", "x")
        shapes.append(element("text", name, x=x, y=height - BOTTOM + 14, class_=style))
    base = f"M{LEFT} {height - BOTTOM}H{width - RIGHT}"
    shapes.append(element("path", d=base, class_="axis"))
    shapes.append(element("text", chart.x_name, x=width - RIGHT, y=height - 5, class_="x name"))
    shapes.append(element("text", chart.y_name, x=LEFT, y=height - 5, class_="name"))
    return shapes


def _line(line: Line, across: ChartScale, up: ChartScale) -> Markup:
    places = [(across.at(x), up.at(min(y, up.high))) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    style = f"line c{line.colour % SERIES_COLOURS}"
    style += " faint" * line.faint + " dashed" * line.dashed
    shown = [element("path", d=path, class_=style)]
    if line.dots or len(places) == 1:  # a path of one point draws nothing
        shown += [
            element(
                "circle",
                cx=f"{x:.1f}",
                cy=f"{y:.1f}",
                r="3",
                class_=f"dot c{line.colour % SERIES_COLOURS}",
            )
            for x, y in places
        ]
    if line.faint:
        return element("g", *shown)
    values = json.dumps([[float(f"{v:.6g}") for v in point] for point in line.points],
                        separators=(",", ":"))  # fmt: skip
    at = json.dumps([round(x) for x, _ in places], separators=(",", ":"))
    return element("g", *shown, data_name=line.name, data_values=values, data_at=at)


def _band(band: Band, across: ChartScale, up: ChartScale) -> Markup:
    above = [f"{across.at(x):.1f} {up.at(min(y, up.high)):.1f}" for x, _, y in band.points]
    below = [f"{across.at(x):.1f} {up.at(y):.1f}" for x, y, _ in reversed(band.points)]
    path = f"M{'L'.join([*above, *below])}Z" if above else "M0 0"
    style = "bar" if band.solid else "band"
    return element("path", d=path, class_=f"{style} c{band.colour % SERIES_COLOURS}")


def _mark(mark: Mark, x_name: str, across: ChartScale, height: int) -> Markup:
    x = f"{across.at(min(max(mark.x, across.low), across.high)):.1f}"
    rule = element("path", d=f"M{x} {TOP}V{height - BOTTOM}", class_=f"mark {mark.kind}")
    return element("g", element("title", f"{x_name} {mark.x:,.0f}: {mark.name}"), rule)


def _level(level: ForecastLevel, up: ChartScale, width: int, left: bool) -> Markup:
    """With its name at the right, or at the left where areas may grow over it."""
    y = f"{up.at(level.y):.1f}"
    rule = element("path", d=f"M{LEFT} {y}H{width - RIGHT}", class_="level")
    place, style = (LEFT + 4, "name") if left else (width - RIGHT, "x name")
    name = element("text", level.name, x=place, y=y, dy="-0.35em", class_=style)
    return element("g", rule, name)


def _series(chart: Chart) -> list[Key]:
    """What has a colour, and which."""
    lines = [line for line in chart.lines if line.points and not line.faint]
    found = [Key(line.name, line.colour, line.dashed) for line in lines]
    return found + [Key(band.name, band.colour) for band in chart.bands if band.name]


def _legend(chart: Chart) -> Markup:
    lines = [line for line in chart.lines if line.points and not line.faint]
    bands = [band for band in chart.bands if band.name]
    keys = [
        (line.name, f"c{line.colour % SERIES_COLOURS}{' dashed' * line.dashed}") for line in lines
    ]
    keys += [(band.name, f"area c{band.colour % SERIES_COLOURS}") for band in bands]
    kinds = dict.fromkeys(mark.kind for mark in chart.marks)
    keys += [(chart.mark_names.get(kind, kind), f"rule {kind}") for kind in kinds]
    items = [element("li", element("span", class_=f"key {style}"), name) for name, style in keys]
    items += [element("li", chart.note)] if chart.note else []
    return element("ul", *items, class_="legend") if len(items) > 1 else Markup("")
