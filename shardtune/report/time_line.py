"""The time line of a run as inline SVG: evaluations, checkpoints, warnings, faults and restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from shardtune.core.runs.run_history import LauncherEvent, RunHistory
from shardtune.report.chart_scale import ChartScale, round_ticks, short
from shardtune.report.line_chart import Mark, figure
from shardtune.report.markup import Markup, element, join, table
from shardtune.report.run_story import public_text

_WIDTH, _ROW, _LEFT = 760, 28, 128
_PLACE = 4.0  # of the picture's units: marks that are nearer share a dot
_CHARACTERS = 1000  # of a fact
MOST_EVENTS = 60  # the last ones, which tell how it ended


def time_line(run: RunHistory) -> Markup:
    """The picture, and under it what the launcher saw, by the clock; empty if nothing happened."""
    evaluated = sorted({each.step for found in run.evaluations.values() for each in found})
    rows = {
        "evaluations": [Mark(step, f"evaluated after step {step}") for step in evaluated],
        "checkpoints kept": [Mark(each.step, each.name, "save") for each in run.saves],
        "warnings": [Mark(each.step, each.fact, "warning") for each in run.warned],
        "faults": [
            Mark(each.step or 0, _fact(each), "fault")
            for each in run.events
            if each.kind in ("failed", "restart")
        ],
        "resumed": [
            Mark(each.step or 0, _fact(each)) for each in run.events if each.kind == "resume"
        ],
        "slow ranks": [
            Mark(each.step or 0, _fact(each), "warning")
            for each in run.events
            if each.kind == "slow" and each.step is not None
        ],
    }
    last = run.steps[-1].step if run.steps else 0
    planned = run.total_steps if run.state == "running" else None
    end = max([planned or 0, last, *(each.step for each in run.saves), 1])
    noted = {name: marks for name, marks in rows.items() if marks}
    picture = _draw(noted, end) if noted else Markup("")
    if not run.events:
        return picture
    seen = [
        (_clock(each.time), each.kind, "" if each.step is None else str(each.step), _fact(each))
        for each in run.events[-MOST_EVENTS:]
    ]
    headings = ("when (UTC)", "what", "step", "fact")
    return join([picture, table(headings, seen, "What the launcher saw")])


def _draw(rows: Mapping[str, Sequence[Mark]], end: int) -> Markup:
    height = len(rows) * _ROW + 26
    across = ChartScale(0, end, _LEFT, _WIDTH - 14)
    shapes: list[str] = []
    for number, (name, marks) in enumerate(rows.items()):
        y = number * _ROW + _ROW / 2
        shapes.append(element("text", name, x=_LEFT - 10, y=y, dy="0.35em", class_="y"))
        shapes.append(element("path", d=f"M{_LEFT} {y}H{_WIDTH - 14}", class_="grid"))
        for mark, others in _places(marks, across, end):
            x = f"{across.at(min(mark.x, end)):.1f}"
            title = mark.name[:300] + (f" (and {others} more here)" if others else "")
            dot = element("circle", element("title", title), cx=x, cy=y, r="4", class_="dot")
            shapes.append(element("g", dot, class_=mark.kind))
    shapes += [
        element("text", short(tick), x=f"{across.at(tick):.1f}", y=height - 6, class_="x")
        for tick in round_ticks(0, end, about=8, whole=True)
    ]
    words = " ".join(_words(name, marks) for name, marks in rows.items())
    return figure("What happened, by step", words, shapes, (_WIDTH, height))


def _places(marks: Sequence[Mark], across: ChartScale, end: int) -> Iterator[tuple[Mark, int]]:
    """The last mark of each place, and how many others would lie under its dot."""
    there: dict[int, list[Mark]] = {}
    for mark in marks:
        there.setdefault(int(across.at(min(mark.x, end)) / _PLACE), []).append(mark)
    return ((found[-1], len(found) - 1) for found in there.values())


def _words(name: str, marks: Sequence[Mark]) -> str:
    places = ", ".join(short(mark.x) for mark in marks[:8])
    more = f" and {len(marks) - 8} more" if len(marks) > 8 else ""
    return f"{name.capitalize()}: {len(marks)}, at step {places}{more}."


def _fact(event: LauncherEvent) -> str:
    if event.kind == "slow" and event.seconds is not None and event.others is not None:
        times = f"{event.seconds:.3g} s a step in {event.phase}, the others {event.others:.3g} s"
        return f"rank {event.rank} is slow: {times}"
    return public_text(event.text or event.cause or event.kind)[:_CHARACTERS]


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}"
