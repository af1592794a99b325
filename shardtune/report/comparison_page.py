"""The page that compares runs: aligned by tokens, with the difference of their jobs on top."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from shardtune.core.files.yaml_leaves import Scalar
from shardtune.core.runs.run_history import RunHistory
from shardtune.report.drawn_figures import DRAWN_FIGURES
from shardtune.report.html_page import html_page, section
from shardtune.report.line_chart import Chart, Line, draw_chart
from shardtune.report.markup import Markup, element, table
from shardtune.report.run_curves import (
    evaluation_points,
    points_of,
    smooth,
    thinned,
    usual_losses,
)
from shardtune.report.run_story import public, verdict

MOST_POINTS = 1600  # of one chart, over all runs
_UNLIKE_ANYWAY = {"save.directory"}


def comparison_page(runs: Sequence[RunHistory]) -> str:
    """Two runs or more beside each other."""
    named = dict(zip(_names(runs), runs, strict=True))
    title = " and ".join(named) if len(named) == 2 else f"{len(named)} runs"
    return html_page(
        f"Comparison of {title}",
        element("header", element("h1", f"Comparison of {title}"), _verdicts(named)),
        section("What the jobs differ in", _job_differences(named)),
        section("How they ended", _ends(named)),
        section("Loss, by tokens", element("div", *_loss_charts(named), class_="charts")),
        section("Steps, by tokens", element("div", *_step_charts(named), class_="charts")),
        section("What they were made with", _versions(named)),
    )


def job_differences(runs: Sequence[RunHistory]) -> dict[str, tuple[Scalar, ...]]:
    """The values of the jobs where they aren't all the same, by key; None where one has none."""
    keys = list(dict.fromkeys(key for run in runs for key in run.job))
    found = {key: tuple(run.job.get(key) for run in runs) for key in keys}
    return {
        key: values
        for key, values in found.items()
        if len(set(map(repr, values))) > 1 and key not in _UNLIKE_ANYWAY
    }


def _names(runs: Sequence[RunHistory]) -> list[str]:
    """A name for each, by its folder; equal ones are counted."""
    names: list[str] = []
    for run in runs:
        same = sum(name == run.name or name.startswith(f"{run.name} (") for name in names)
        names.append(f"{run.name} ({same + 1})" if same else run.name)
    return names


def _verdicts(named: dict[str, RunHistory]) -> Markup:
    said = [
        element(
            "li", element("strong", name), " ",
            element("span", run.state, class_=f"state {run.state}"), " ", verdict(run),
        )
        for name, run in named.items()
    ]  # fmt: skip
    return element("ul", *said)


def _job_differences(named: dict[str, RunHistory]) -> Markup:
    found = job_differences(list(named.values()))
    if not found:
        return element("p", "Nothing: the jobs are the same, but for their folders.")
    rows = [(key, *map(_shown, values)) for key, values in found.items()]
    return table(("key", *named), rows, "Values that differ")


def _shown(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "(none)" if value is None else public(str(value))


def _ends(named: dict[str, RunHistory]) -> Markup:
    sets = list(dict.fromkeys(name for run in named.values() for name in run.evaluations))
    rows = []
    for name, run in named.items():
        finals = [
            _number(found[-1].loss) if (found := run.evaluations.get(each)) else "" for each in sets
        ]
        best = [
            _number(min((e.loss for e in run.evaluations.get(each, ()) if e.loss is not None),
                        default=None))
            for each in sets
        ]  # fmt: skip
        speeds = [step.tokens_per_second for step in run.steps]
        rows.append(
            (
                name,
                run.state,
                f"{run.steps[-1].step:,}" if run.steps else "0",
                f"{run.tokens[-1]:,}" if run.tokens else "0",
                *(f"{last} ({low})" for last, low in zip(finals, best, strict=True)),
                f"{median(speeds):,.0f}" if speeds else "",
                f"{max((step.memory_gib for step in run.steps), default=0.0):.2f}",
            )
        )
    headings = ("run", "state", "steps", "tokens", *(f"{each}: last (best) loss" for each in sets),
                "tokens/s (median)", "GiB")  # fmt: skip
    return table(headings, rows, "Ends")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _loss_charts(named: dict[str, RunHistory]) -> list[Markup]:
    most, tokens = max(60, MOST_POINTS // len(named)), _tokens_of(named.values())
    losses = {name: smooth(usual_losses(run, by_tokens=True)) for name, run in named.items()}
    training = [
        Line(name, thinned(mean, most), colour=number, dashed=number % 2 == 1)
        for number, (name, (mean, _)) in enumerate(losses.items())
    ]
    title = "Training loss" + ", smoothed" * any(band for _, band in losses.values())
    title += ", without spikes" * any(e.kind == "spike" for r in named.values() for e in r.warned)
    charts = [Chart(title, "tokens", "loss", training, wide=True, x_range=tokens)]
    sets = list(dict.fromkeys(name for run in named.values() for name in run.evaluations))
    each_set = max(20, 3 * MOST_POINTS // (len(named) * max(1, len(sets))))
    for one in sets:
        lines = [
            Line(
                name,
                thinned(points, min(most, each_set)),
                colour=number,
                dashed=number % 2 == 1,
                dots=len(points) <= 30,
            )
            for number, (name, run) in enumerate(named.items())
            if (points := evaluation_points(run, by_tokens=True).get(one))
        ]
        charts.append(Chart(f"{one}, held out", "tokens", "loss", lines, wide=True, x_range=tokens))
    return [draw_chart(chart) for chart in charts]


def _step_charts(named: dict[str, RunHistory]) -> list[Markup]:
    most, tokens = max(40, MOST_POINTS // 2 // len(named)), _tokens_of(named.values())
    charts = []
    for figure in DRAWN_FIGURES:
        lines = [
            Line(name, thinned(points, most), colour=number, dashed=number % 2 == 1)
            for number, (name, run) in enumerate(named.items())
            if (points := points_of(run, figure.value, by_tokens=True))
        ]
        if lines:
            charts.append(
                Chart(
                    figure.title,
                    "tokens",
                    figure.unit,
                    lines,
                    from_zero=figure.from_zero,
                    x_range=tokens,
                )
            )
    return [draw_chart(chart) for chart in charts]


def _tokens_of(runs: Iterable[RunHistory]) -> tuple[float, float]:
    """What all charts show of the x axis."""
    return 0.0, float(max((run.tokens[-1] for run in runs if run.tokens), default=0))


def _versions(named: dict[str, RunHistory]) -> Markup:
    found: dict[str, list[str]] = {}
    for number, run in enumerate(named.values()):
        made = run.environment
        if made is not None:
            facts = {
                "shardtune": made.shardtune, "Python": made.python, "ranks": str(made.ranks),
                "GPUs": ", ".join(made.gpus) or "none", **made.packages,
                **{f"digest of {name}": digest[:12] for name, digest in made.data.items()},
            }  # fmt: skip
            for key, value in facts.items():
                found.setdefault(key, [""] * len(named))[number] = value
    rows = [(key, *values) for key, values in found.items() if len(set(values)) > 1]
    if not rows:
        return element("p", "The same versions, ranks and data.")
    return table(("what", *named), rows, "Versions and data that differ")
