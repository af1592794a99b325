"""The lines that stay at the bottom of a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.runs.metrics import LossSpike
from shardtune.report.notebook import as_html, in_notebook, show_line
from shardtune.report.run_panel import RunPanel, StepForecastLine, StepNumbers, trend
from tests.reports import evaluation_line, step_line

NUMBERS = StepNumbers(1.2345, 2e-4, 0.695, 12345.6, 2.594, 0.97)


def frame(panel: RunPanel, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(panel)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def figures(loss: float, accuracy: float = 0.5) -> EvalFigures:
    return EvalFigures(loss=loss, perplexity=2.0, accuracy=accuracy, labels=10)


def test_everything_that_a_person_watches_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    panel = RunPanel(400, StepForecastLine(13000.0, 2.7))
    panel.evaluation("code", figures(1.5121))
    for done in range(1, 121):
        panel.step(done, NUMBERS, seconds_left=751.0)
    panel.evaluation("code", figures(0.7511, 0.818))
    bar, loss, speed, code = frame(panel)
    assert bar.startswith("step 120/400 ━━")
    assert bar.endswith(" 30%  12:31 left")
    assert loss.startswith("loss 1.2345 ")
    assert loss.endswith(" steady  lr 2.00e-04  grad 0.695")
    assert speed == "12,346 tok/s (forecast 13,000)  2.59 GiB (forecast 2.70)  97% busy"
    assert code == "code: loss 0.7511 (before: 1.5121)  accuracy 81.8%"


def test_the_time_left_goes_on_falling(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    panel = RunPanel(4)
    assert frame(panel)[0].endswith("starting")
    panel.step(1, NUMBERS, seconds_left=100.0)
    now = 40.0
    assert frame(panel)[0].endswith("1:00 left")
    panel.phase("evaluating: 3 of 12", 90.0)
    assert frame(panel)[0].endswith("1:30 left")
    assert frame(panel)[1] == "evaluating: 3 of 12"


def test_where_the_loss_is_going() -> None:
    assert trend([4.0] * 10 + [3.0] * 10) == "falling 25.0%"
    assert trend([2.0] * 10 + [3.0] * 10) == "rising 50.0%"
    assert trend([2.0, 2.001] * 10) == "steady"
    assert trend([3.0, 1.0]) == "", "a few steps tell nothing"
    panel = RunPanel(100)
    for done, loss in enumerate([4.0, 3.0, 2.0, 1.0], 1):
        panel.step(done, StepNumbers(loss, 1e-3, 1.0, 1.0, 1.0, None), 1.0)
    assert "█▆▃▁" in frame(panel)[1].replace("▅", "▆").replace("▄", "▃")


def test_warnings_stay_and_are_counted() -> None:
    panel = RunPanel(9)
    for number in range(5):
        panel.warn(f"step {number}: {'x' * 200}\nmore")
    *_, count, third, fourth, fifth = frame(panel)
    assert count == "2 earlier warnings above"
    assert [line[:8] for line in (third, fourth, fifth)] == ["! step 2", "! step 3", "! step 4"]
    assert fifth.endswith("…")


def test_many_sets_do_not_fill_the_screen() -> None:
    panel = RunPanel(9)
    for number in range(12):
        panel.evaluation(f"set-{number}", figures(1.0))
    assert frame(panel)[-1] == "and 8 more sets"
    assert "before" not in "".join(frame(panel)), "there is nothing to compare with yet"


def test_a_notebook_draws_it_from_the_metrics() -> None:
    panel = RunPanel(0)
    show_line(panel, step_line(7))
    show_line(panel, evaluation_line(7, "<held>", 1.5))
    show_line(panel, LossSpike(kind="spike", step=7, fact="high", usual=1.0, samples=()))
    page = as_html(panel)
    assert page.startswith('<pre style="')
    assert "step 7 " in page, "nobody knows how many there are"
    assert "&lt;held&gt;: loss 1.5000" in page
    assert "! step 7: high" in page
    assert not in_notebook()


def test_drawing_costs_little() -> None:
    """It is drawn once a second: 0.5 % of that are 5 ms, of the thread that trains."""
    panel = RunPanel(400, StepForecastLine(13000.0, 2.7))
    for done in range(1, 300):
        panel.step(done, NUMBERS, 60.0)
    for name in ("a", "b", "c"):
        panel.evaluation(name, figures(1.0))
        panel.warn(name)
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    console.print(panel)
    begun = time.thread_time()
    for _ in range(10):
        console.print(panel)
    assert (time.thread_time() - begun) / 10 < 5e-3
