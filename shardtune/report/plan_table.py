"""Forecasts and rankings, as a person wants to read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from shardtune.core.layout import Cargo, Of
from shardtune.core.units import GIB, in_units, three_digits
from shardtune.plan.forecast import Forecast
from shardtune.plan.forecast_summary import ChosenValue, DryRunSummary
from shardtune.plan.search import Ranking
from shardtune.report.duration import duration
from shardtune.report.job_table import show_value

BAR = 40  # letters that a full GPU is wide, or all that is needed where that is more


def print_forecast(found: Forecast, console: Console) -> None:
    """Memory by class as bars, the step by part, traffic by move, and what it comes to."""
    console.print(_verdict(found))
    console.print(_memory(found))
    console.print(_step(found))
    if found.speed.sent:
        console.print(_traffic(found))
    for reason in found.reasons:
        console.print(Text(reason, style="dim"))


def print_chosen(chosen: Sequence[ChosenValue], console: Console) -> None:
    """What stands in place of `auto`, a line each."""
    for each in chosen:
        console.print(Text(f"{each.key}: {_plain(each.value)} ({each.why})", style="dim"))


def _plain(value: object) -> str:
    """A value as a job file has it, in a line."""
    if not isinstance(value, Mapping):
        return show_value(value)
    parts = (f"{key}: {_plain(each)}" for key, each in value.items() if each not in (None, False))
    return f"{{{', '.join(parts)}}}"


def print_outlook(found: Forecast, steps: int, console: Console | None = None) -> None:
    """The forecast in a line, for a run that is about to start."""
    peak, room = found.memory.peak / GIB, found.capacity / GIB
    line = f"forecast: {peak:.2f} of {room:.1f} GiB on each {found.cluster.gpu.name}"
    # Of a processor nobody has measured we know too little to name a time.
    if found.cluster.gpu.name != "CPU" or found.cluster.measured.matmul:
        seconds = found.speed.step.total
        step = three_digits(seconds)
        line += f", {step} s a step, {duration(seconds * steps)} for {steps:,} steps"
    (console or Console()).print(Text(line))


def print_dry_run(seen: DryRunSummary, console: Console) -> None:
    """What a dry run found, beside the closed form of the same."""
    line = f"dry run: {seen.allocated_gib:.2f} GiB allocated, most in the {seen.moment} pass"
    closed = f"; by the closed form {seen.closed_form_gib:.2f} ({seen.difference:+.1%})"
    console.print(Text(f"{line}{closed}, each operation on its own"))


def _verdict(found: Forecast) -> Text:
    needed, room = found.memory.required / GIB, found.capacity / GIB
    colour = {"fits": "green", "tight": "yellow", "does not fit": "red"}[found.verdict]
    band = f"{found.band.lower / GIB:.1f} to {found.band.upper / GIB:.1f}"
    moment = {
        "building": "while it is loaded",
        "forward": "at the end of the forward pass",
        "backward": "in the backward pass",
        "optimizer": "in the update",
        "evaluation": "in the evaluation",
        "save": "while saving",
    }[found.memory.moment]
    return Text.assemble(
        (found.verdict, f"bold {colour}"),
        f": {needed:.1f} ({band}) of {room:.1f} GiB on each {found.cluster.gpu.name}, {moment}",
        (f"\n{found.job.strategy.type}, {_mesh(found)}, {_rows(found)}", "dim"),
        (f", activation checkpointing: {found.checkpointing}", "dim"),
        (f"\n{_parameters(found)}", "dim"),
    )


def _parameters(found: Forecast) -> str:
    """`8.03 B parameters, 0.04 B of them trained`; of a mixture also those that a token meets."""
    counts = found.summary().parameters
    active = ""
    if counts.active < counts.total:
        active = f" ({_count(counts.active)} for a token)"
    return f"{_count(counts.total)} parameters{active}, {_count(counts.trained)} trained"


def _count(number: int) -> str:
    return in_units(number, ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")))


def _rows(found: Forecast) -> str:
    count, rows = found.work.microbatches, found.work.micro_batch
    return f"{count} micro-batch{'es' * (count > 1)} of {rows} row{'s' * (rows > 1)}"


def _mesh(found: Forecast) -> str:
    return " x ".join(f"{name}({size})" for name, size in found.mesh.axes)


def _memory(found: Forecast) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("on a GPU, GiB")
    table.add_column(justify="right")
    table.add_column()
    memory = found.memory
    sizes: dict[str, float] = dict(memory.gpu.items())
    sizes["overhead"] = memory.required - memory.allocated
    for name, size in sizes.items():
        bar = "█" * round(BAR * size / max(found.capacity, memory.required))
        table.add_row(name, f"{size / GIB:.2f}", bar)
    if memory.cached:
        table.add_row("cached, if there is room", f"{memory.cached / GIB:.2f}", "")
    table.add_row("CPU memory of a node", f"{found.host / GIB:.2f}", "")
    if memory.nvme:
        table.add_row("disk of a rank", f"{memory.nvme / GIB:.2f}", "")
    return table


def _step(found: Forecast) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("a step, seconds")
    table.add_column(justify="right")
    step = found.speed.step
    for name in ("compute", "communication", "optimizer", "offload", "bubble", "data"):
        seconds = getattr(step, name)
        if seconds:
            table.add_row(name, f"{seconds:.3f}")
    table.add_row("total", f"{step.total:.3f}")
    table.add_row("tokens a second", f"{found.speed.tokens_per_second:,.0f}")
    table.add_row("MFU", f"{found.speed.mfu:.1%}")
    if found.imbalance > 1:
        table.add_row("tokens of the busiest rank's experts", f"{found.imbalance:.2f} x the mean")
    if found.hours is not None:
        table.add_row(f"{found.job.train.steps:,} steps", duration(found.hours * 3600))
    if found.cost is not None:
        table.add_row("cost", f"{found.cost:,.2f}")
    return table


_CARGO: dict[Cargo, str] = {
    "params": "weights",
    "recalled": "weights, for the backward pass",
    "trained": "updated weights",
    "grads": "gradients",
    "unsliced": "gradients of weights that tensor parallelism replicates",
    "tied": "gradients of weights that two stages have",
    "hidden": "activations",
    "embedded": "gradients of the embedding's result",
    "scores": "sums for the loss",
    "routed": "tokens to experts and back",
}
_OF: dict[Of, str] = {"all": "", "experts": " of experts", "others": " but experts"}


def _traffic(found: Forecast) -> Table:
    """Moves that are alike in one line."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("sent by a GPU in a step", "axis", "link", "GiB"):
        table.add_column(heading, justify="right" if heading == "GiB" else "left")
    together: dict[tuple[str, str, str], float] = defaultdict(float)
    for move in found.traffic().moves:
        name = f"{move.op.replace('_', '-')} of {_CARGO[move.what]}{_OF[move.of]}"
        together[name, move.axis, move.link.replace("_", "-")] += move.gib
    for (name, axis, link), size in together.items():
        if size:
            table.add_row(name, axis, link, f"{size:.3f}")
    return table


def print_ranking(ranking: Ranking, console: Console) -> None:
    """The best first; of every other, why it isn't."""
    table = Table(box=box.SIMPLE, collapse_padding=True)
    priced = any(each.found and each.found.cost is not None for each in ranking.candidates)
    headings = ["strategy", "step", "tokens/s", "GPU, GiB", "micro-batch", "checkpointing"]
    for heading in headings + ["cost"] * priced:
        words = heading in ("strategy", "checkpointing")
        justify: JustifyMethod = "left" if words else "right"
        table.add_column(heading, justify=justify, min_width=len(heading))  # names are wrapped
    for each in ranking.candidates:
        found = each.found
        if found is None:
            continue
        speed, cost = found.speed, found.cost
        table.add_row(
            each.name,
            f"{speed.step.total:.2f} s" if each.fits else "",
            f"{speed.tokens_per_second:,.0f}" if each.fits else "",
            f"{found.memory.required / GIB:.1f} / {found.capacity / GIB:.0f}",
            str(found.work.micro_batch),
            found.checkpointing,
            *([f"{cost:,.2f}" if each.fits else ""] if cost is not None else []),
            style="" if each.fits else "dim",
        )
    console.print(table)
    for why, alike in groupby(ranking.candidates, key=lambda each: each.why):
        several = list(alike)
        style = "bold" if several[0] is ranking.best else "" if several[0].fits else "dim"
        console.print(Text(f"{'; '.join(each.name for each in several)}: {why}", style=style))
