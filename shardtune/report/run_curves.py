"""The curves of a run, as charts: loss and held-out loss, and what a step took."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from itertools import accumulate

from shardtune.core.runs.metrics import CurveWarning, LossSpike, StepMetrics
from shardtune.core.runs.run_history import RunHistory, StepForecast, thin
from shardtune.core.runs.thinning import SMOOTHED_PART
from shardtune.report.chart_scale import short
from shardtune.report.drawn_figures import DRAWN_FIGURES
from shardtune.report.line_chart import SERIES_COLOURS, Band, Chart, ForecastLevel, Line, Mark

POINTS = 360  # of a line; more than a screen shows
SET_POINTS = 600  # of all held-out sets together, or of all tasks
MOST_MARKS = 40

Points = list[tuple[float, float]]


def loss_chart(run: RunHistory) -> Chart:
    """The training loss with its smoothing band, each held-out set, and where a warning came.
    Spikes are neither smoothed nor fitted in: one of 40 would press all else to the bottom."""
    losses, usual = points_of(run, lambda step: step.loss), usual_losses(run)
    mean, band = smooth(usual)
    without = " without spikes" if len(usual) < len(losses) else ""
    measured = Line("training loss", thinned(losses), faint=bool(band))
    smoothed = [Line(f"training loss, smoothed{without}", thinned(mean))] if band else []
    held_out = evaluation_points(run)
    most = max((y for each in (usual, *held_out.values()) for _, y in each), default=0.0)
    highest = max(losses, key=lambda point: point[1], default=(0, 0.0))
    cut = f"cut off: a loss of {short(highest[1])} at step {short(highest[0])}"
    return Chart(
        "Loss by step",
        "step",
        "loss (mean cross-entropy of trained tokens)",
        [measured, *smoothed, *_held_out(held_out)],
        [Band("one standard deviation", band)] if len(band) > 2 else [],
        warning_marks(run),
        wide=True,
        x_range=_steps_of(run),
        y_most=most if highest[1] > most else None,
        note=cut if highest[1] > most else "",
        mark_names={"fault": "spike, or gradient not finite"},
    )


def _held_out(found: Mapping[str, Points]) -> list[Line]:
    return [
        Line(
            f"{name}, held out",
            thinned(points, _share(found)),
            colour=number,
            dots=len(points) <= 60,
            dashed=number >= SERIES_COLOURS,  # the colours begin anew
        )
        for number, (name, points) in enumerate(found.items(), 1)
    ]


def _steps_of(run: RunHistory) -> tuple[float, float] | None:
    """The first and the last step: the axis of all charts, whether or not losses were finite."""
    return (float(run.steps[0].step), float(run.steps[-1].step)) if run.steps else None


def task_chart(run: RunHistory) -> Chart:
    """The score of each task, with its confidence interval."""
    lines, bands = [], []
    for number, (name, all_found) in enumerate(run.tasks.items()):
        metric = f"{name} ({all_found[0].metric})"
        found = thin(all_found, _share(run.tasks), lambda each: each.score)
        points = [(float(each.step), each.score) for each in found]
        again = number >= SERIES_COLOURS  # the colours begin anew
        lines.append(Line(metric, points, number, dots=len(points) <= 60, dashed=again))
        interval = [(float(each.step), each.low, each.high) for each in found]
        bands.append(Band("95 % interval" if number == 0 else "", interval, colour=number))
    return Chart("Score of each task", "step", "score, from 0 to 1", lines, bands, wide=True)


def _share(named: Sized) -> int:
    """How many points each of several lines may have, so that the page stays small."""
    return min(POINTS, max(20, SET_POINTS // max(1, len(named))))


def step_charts(run: RunHistory) -> list[Chart]:
    """What the optimizer did and what a step took, each over its forecast where there is one."""
    on_gpu = run.environment is not None and bool(run.environment.gpus)
    forecast = run.forecast if on_gpu and run.forecast is not None else StepForecast()
    charts = []
    for number, figure in enumerate(DRAWN_FIGURES):
        points = thinned(points_of(run, figure.value))
        if points:
            predicted = figure.predicted(forecast)
            charts.append(
                Chart(
                    figure.title,
                    "step",
                    figure.unit,
                    [Line(figure.title, points, colour=number)],
                    levels=[ForecastLevel("forecast", predicted)] if predicted else [],
                    from_zero=figure.from_zero,
                    x_range=_steps_of(run),
                )
            )
    return charts


def usual_losses(run: RunHistory, *, by_tokens: bool = False) -> Points:
    """The losses without those that the run called spikes; all, where that is all there are."""
    spikes = {each.step for each in run.warned if isinstance(each, LossSpike)}
    found = points_of(
        run, lambda step: None if step.step in spikes else step.loss, by_tokens=by_tokens
    )
    return found or points_of(run, lambda step: step.loss, by_tokens=by_tokens)


def points_of(
    run: RunHistory, value: Callable[[StepMetrics], float | None], *, by_tokens: bool = False
) -> Points:
    """By step or by tokens, where the value is a number."""
    places = run.tokens if by_tokens else tuple(step.step for step in run.steps)
    found = ((float(x), value(step)) for x, step in zip(places, run.steps, strict=True))
    return [(x, y) for x, y in found if y is not None and math.isfinite(y)]


def evaluation_points(run: RunHistory, *, by_tokens: bool = False) -> dict[str, Points]:
    """The loss of each held-out set, by step or by tokens."""
    behind = dict(zip((step.step for step in run.steps), run.tokens, strict=True)) | {0: 0}
    return {
        name: [
            (float(behind[each.step] if by_tokens else each.step), each.loss)
            for each in found
            if each.loss is not None and (each.step in behind or not by_tokens)
        ]
        for name, found in run.evaluations.items()
    }


def thinned(points: Points, most: int = POINTS) -> Points:
    return thin(points, most, lambda point: point[1])


def smooth(points: Points) -> tuple[Points, list[tuple[float, float, float]]]:
    """A moving average over a part of the run, and the standard deviation around it."""
    window = max(1, len(points) // SMOOTHED_PART)
    if window < 2:
        return points, []
    # Sums from the mean on: the squares of a small spread around a large value would cancel.
    centre = sum(y for _, y in points) / len(points)
    sums = [0.0, *accumulate(y - centre for _, y in points)]
    squares = [0.0, *accumulate((y - centre) ** 2 for _, y in points)]
    mean: Points = []
    band = []
    every = max(1, len(points) // POINTS)
    for at in (*range(0, len(points) - 1, every), len(points) - 1):
        begin, end = max(0, at - window), min(len(points), at + window + 1)
        count = end - begin
        average = (sums[end] - sums[begin]) / count
        spread = math.sqrt(max(0.0, (squares[end] - squares[begin]) / count - average**2))
        x, y = points[at][0], average + centre
        mean.append((x, y))
        band.append((x, y - spread, y + spread))
    return mean, band


def warning_marks(run: RunHistory) -> list[Mark]:
    """Where the run warned; of many spikes and gradients that weren't finite the first ones."""
    warned: Sequence[Mark] = [
        Mark(each.step, each.about.replace("_", " "), "warning")
        if isinstance(each, CurveWarning)
        else Mark(each.step, each.fact, "fault")
        for each in sorted(run.warned, key=lambda each: not isinstance(each, CurveWarning))
    ]
    return sorted(warned[:MOST_MARKS], key=lambda mark: mark.x)
