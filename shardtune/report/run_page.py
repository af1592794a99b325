"""The page of a run: `report.html`, one self-contained file with all that the run knows.

It is made from the run directory alone, by the run itself at its end and by `shardtune report` at
any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shardtune.config.job import Job
from shardtune.config.job_differences import differences_from_defaults
from shardtune.config.job_file import load_job
from shardtune.core.files.atomic_write import atomic_write
from shardtune.core.runs.metrics import CurveWarning
from shardtune.core.runs.run_history import RunHistory, read_run_history
from shardtune.core.runs.run_report import SampleAnswers
from shardtune.core.runs.run_state import RunState
from shardtune.errors import ShardtuneError
from shardtune.report.data_section import data_section
from shardtune.report.html_page import html_page, section
from shardtune.report.line_chart import draw_chart
from shardtune.report.markup import Markup, element, join, table
from shardtune.report.run_curves import loss_chart, step_charts, task_chart
from shardtune.report.run_story import (
    commands,
    counted,
    figures,
    proofs,
    public,
    public_text,
    verdict,
)
from shardtune.report.step_bars import step_bars
from shardtune.report.time_line import time_line

PAGE_FILE = "report.html"
_OPEN_SAMPLES = 3  # answers that are shown at once
_MOST_SAMPLES = 12
_CHARACTERS = 4000  # of one answer
_MOST_PLACES = 8  # steps that are named


def write_run_page(run_dir: Path, state: RunState | None = None) -> Path:
    """Writes `report.html`. `state` is for who knows better than the files do."""
    run = read_run_history(run_dir)
    path = run_dir / PAGE_FILE
    atomic_write(path, run_page(run if state is None else replace(run, state=state)))
    return path


def try_write_run_page(
    run_dir: Path, say: Callable[[str], None], state: RunState | None = None
) -> None:
    """The same for a run's own end, which no page may spoil: what goes wrong is one line."""
    try:
        write_run_page(run_dir, state)
    except Exception as error:  # noqa: BLE001
        first = (str(error).splitlines() or [""])[0]
        say(f"{PAGE_FILE} was not written: {type(error).__name__}: {first}")


def run_page(run: RunHistory) -> str:
    """The page as text."""
    job = _job(run)
    steps = [draw_chart(chart) for chart in step_charts(run)]
    return html_page(
        f"{run.name}: {run.state}",
        element("header", element("h1", run.name), _headline(run)),
        section("Warnings", _warnings(run)),
        section("Answers before and after", _answers(run)),
        section("Loss", _losses(run), draw_chart(loss_chart(run))),
        section("Tasks", draw_chart(task_chart(run)) if run.tasks else ""),
        section(
            "Steps",
            element("div", *steps, class_="charts") if steps else "",
            _forecast(run),
        ),
        section("Where the time of a step went", step_bars(run)),
        section("What happened", time_line(run)),
        section("Data", data_section(run.data) if run.data is not None else ""),
        section("What was proven", _proofs(run, job)),
        section("Next", _commands(run, job)),
        section("The job", _job_section(run, job)),
        section("Versions and digests", _environment(run)),
    )


def _headline(run: RunHistory) -> Markup:
    state = element("span", run.state, class_=f"state {run.state}")
    return join([element("p", state), element("p", verdict(run), class_="verdict")])


def _warnings(run: RunHistory) -> str:
    said = [
        element("li", f"Step {each.step}: {each.fact}.", class_="warning")
        for each in run.warned
        if isinstance(each, CurveWarning)
    ]
    spikes = [each.step for each in run.warned if each.kind == "spike"]
    skipped = [each.step for each in run.warned if each.kind == "not_finite"]
    if spikes:
        fact = f"{counted(len(spikes), 'loss was', 'losses were')} far above those before"
        said.append(element("li", f"{fact}: {_places(spikes)}."))
    if skipped:
        fact = f"{counted(len(skipped), 'update was', 'updates were')} left out"
        said.append(element("li", f"{fact}, their gradients not finite: {_places(skipped)}."))
    if run.bad_lines:
        lines = counted(run.bad_lines, "line", "lines")
        said.append(element("li", f"{lines} of metrics.jsonl can't be read."))
    return element("ul", *said, class_="warnings") if said else ""


def _places(steps: Sequence[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:_MOST_PLACES])
    more = f" and {len(steps) - _MOST_PLACES:,} more" if len(steps) > _MOST_PLACES else ""
    return f"step{'s' * (len(steps) > 1)} {shown}{more}"


def _answers(run: RunHistory) -> str:
    samples = run.report.samples if run.report is not None else ()
    shown = [_answer(each) for each in samples[:_OPEN_SAMPLES]]
    rest = [_answer(each) for each in samples[_OPEN_SAMPLES:_MOST_SAMPLES]]
    if rest:
        shown.append(element("details", element("summary", f"{len(rest)} more"), *rest))
    return join(shown)


def _answer(sample: SampleAnswers) -> Markup:
    def said(title: str, text: str) -> Markup:
        long = len(text) > _CHARACTERS
        shown = (text[:_CHARACTERS] + " ...") if long else text or "(nothing)"
        return element("div", element("h4", title), element("pre", shown))

    asked = element("pre", sample.prompt[:_CHARACTERS])
    both = element(
        "div", said("before", sample.before), said("after", sample.after), class_="answers"
    )
    reference = element("details", element("summary", "the answer in the data"),
                        element("pre", sample.reference[:_CHARACTERS]))  # fmt: skip
    return element("article", element("h3", "Held-out prompt"), asked, both, reference)


def _losses(run: RunHistory) -> str:
    if run.report is None or not run.report.evaluation:
        return ""
    rows = []
    for name, found in run.report.evaluation.items():
        before, after = figures(found.before), figures(found.after)
        pairs = (f"{old} → {new}" for old, new in zip(before, after, strict=True))
        rows.append((name, *pairs, f"{found.after.labels:,}"))
    headings = ("data set", "loss", "perplexity", "token accuracy", "trained tokens")
    return table(headings, rows, "Held-out sets, before and after")


def _forecast(run: RunHistory) -> str:
    found = run.report.forecast if run.report is not None else None
    if found is None:
        return ""
    held = found.held_bytes
    rows = [
        (name, f"{pair.predicted / 2**20:,.2f} MiB", f"{pair.measured / 2**20:,.2f} MiB",
         "" if pair.error is None else f"{pair.error:+.1%}")
        for name, pair in (("weights", held.params), ("gradients", held.grads),
                           ("optimizer states", held.optim))
    ]  # fmt: skip
    for name, pair, unit in (
        ("peak memory", found.peak_gib, "GiB"),
        ("speed", found.tokens_per_second, "tokens/s"),
    ):
        if pair is not None:
            error = "" if pair.error is None else f"{pair.error:+.1%}"
            rows.append(
                (name, f"{pair.predicted:,.4g} {unit}", f"{pair.measured:,.4g} {unit}", error)
            )
    return table(("of a rank", "forecast", "measured", "error"), rows, "Forecast beside measured")


def _proofs(run: RunHistory, job: Job | None) -> str:
    found = proofs(run, job)
    return table(("claim", "what was compared"), found, "Proofs") if found else ""


def _commands(run: RunHistory, job: Job | None) -> Markup:
    where = f"From the folder in which {run.name} was started, or with the run's own path:"
    found = [
        join([element("h3", name), element("pre", line, class_="command")])
        for name, line in commands(run, job)
    ]
    return join([element("p", where, class_="soft"), *found])


def _job_section(run: RunHistory, job: Job | None) -> str:
    if job is None:
        return element("pre", public_text(run.job_text[:20_000])) if run.job_text else ""
    rows = [
        (each.key, public(each.value), each.default or "(must be said)")
        for each in differences_from_defaults(job)
    ]
    return table(("key", "value", "default"), rows, "The job, where it differs from the defaults")


def _environment(run: RunHistory) -> str:
    found = run.environment
    if found is None:
        return ""
    git = "none" if found.git is None else found.git.revision + " (changed)" * found.git.changed
    rows = [
        ("run", found.run),
        ("shardtune", found.shardtune),
        ("Python", found.python),
        ("platform", found.platform),
        ("ranks", str(found.ranks)),
        ("GPUs", ", ".join(found.gpus) or "none"),
        ("git revision", git),
        *found.packages.items(),
        *((f"digest of {name}", digest) for name, digest in found.data.items()),
    ]
    return table(("what", "value"), rows, "Versions and digests")


def _job(run: RunHistory) -> Job | None:
    """The job; None where this version can't read it."""
    try:
        return load_job(run.path / "job.yaml").job
    except ShardtuneError:
        return None
