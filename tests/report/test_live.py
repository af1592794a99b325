"""The view of a run: live on a terminal, plain lines in a log."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from shardtune.core.step import EvalResult, Reading, StepResult
from shardtune.report.duration import duration
from shardtune.report.live import RunView

READING = Reading(seconds=1.0, tokens_per_second=12345.6, seconds_left=391.0, memory_gib=2.594)


def result(loss: float = 1.52431, *, applied: bool = True) -> StepResult:
    norm = 0.69509 if applied else math.nan
    return StepResult(loss, norm, 2e-4, tokens=2004, labels=998, applied=applied)


def log() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_plain_lines() -> None:
    console = log()
    with RunView(2, console=console) as view:
        view.evaluation(0, [EvalResult("held", 20.0, 3, 10)])
        view.step(1, result(), READING)
        view.step(2, result(0.5), READING)
    # perplexity is e^(20/10)
    assert text(console).splitlines() == [
        "after step 0  held: loss 2.0000  perplexity 7.39  accuracy 30.0%",
        "step 1/2  loss 1.5243  lr 2.00e-04  grad 0.695  12,346 tok/s  2.59 GiB  6:31 left",
        "step 2/2  loss 0.5000  lr 2.00e-04  grad 0.695  12,346 tok/s  2.59 GiB  6:31 left",
    ]


def test_a_long_run_does_not_flood_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = log()
    with RunView(1010, console=console) as view:
        for done in range(1, 1011):
            now += 1.0
            view.step(done, result(), READING)
    lines = text(console).splitlines()
    assert 45 <= len(lines) <= 55
    assert lines[0].startswith("step 1/1010 ")
    assert lines[-1].startswith("step 1010/1010 ")


def test_nor_does_a_quick_one() -> None:
    console = log()
    with RunView(40, console=console) as view:
        for done in range(1, 41):
            view.step(done, result(), READING)
    steps = [line.split()[1] for line in text(console).splitlines()]
    assert steps == ["1/40", "40/40"], "one line every few seconds at most"


def test_a_quiet_run_warns_only() -> None:
    for console in (log(), terminal()):
        with RunView(2, quiet=True, console=console) as view:
            view.say("loading the model")
            view.evaluation(0, [EvalResult("held", 20.0, 3, 10)])
            view.step(1, result(), READING)
            view.warn("step 1: the gradient is not finite")
        found = text(console)
        assert "step 1: the gradient is not finite" in found
        assert not re.search("loading|held|loss", found)


def test_a_line_is_never_broken() -> None:
    console = log()
    with RunView(1, console=console) as view:
        view.say("x" * 200)
    assert text(console) == "x" * 200 + "\n"


def test_a_text_is_no_markup() -> None:
    console = log()
    with RunView(1, console=console) as view:
        view.say("resuming after step 3, from runs/[bold]/step-000003")
    assert text(console) == "resuming after step 3, from runs/[bold]/step-000003\n"


def test_a_terminal_is_live() -> None:
    console = terminal()
    with RunView(60, console=console) as view:
        view.say("resuming")
        view.step(1, result(), READING)
        view.step(2, result(0.5), READING)
        view.say("drawn")
    written = text(console)
    assert "6:31 left" in written.split("drawn\n")[1].splitlines()[0]
    assert "\x1b[?25l" in written, "the cursor is hidden while it is live"
    assert written.endswith("\x1b[?25h"), "and shown again"
    last = written[written.rindex("step ") :]
    numbers = ("loss 0.5000", "lr 2.00e-04", "grad 0.695", "12,346 tok/s", "2.59 GiB")
    for fragment in ("2/60", *numbers):
        assert fragment in last
    assert "resuming\n" in written


def test_a_warning_stays_in_sight() -> None:
    console = terminal()
    with RunView(60, console=console) as view:
        view.warn("step 1: the loss is 7.8, 3 times the usual 2.6")
        for done in range(1, 30):
            view.step(done, result(), READING)
    frame = text(console).rsplit("step 29/60", 1)[1]
    assert "! step 1: the loss is 7.8, 3 times the usual 2.6" in frame


def test_the_cursor_comes_back_after_a_failure() -> None:
    console = terminal()
    with pytest.raises(ValueError, match="gone"), RunView(60, console=console):
        raise ValueError("gone")
    assert text(console).endswith("\x1b[?25h")


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with RunView(3, shown=False) as view:
        view.step(1, result(), READING)
        view.say("hello")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "expected"), [
    (0, "0:00"), (0.6, "0:01"), (59.4, "0:59"), (59.6, "1:00"), (61, "1:01"), (3599.7, "1:00:00"),
    (3723, "1:02:03"), (360_000, "100:00:00"),
])  # fmt: skip
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_a_long_phase_is_told_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = log()
    with RunView(2, console=console) as view:
        with view.phase("evaluating") as progress:
            for done in range(8):
                now = 4.0 * done
                progress(done, 8)
        now = 100.0
        with view.phase("answering", run_left=100.0) as progress:
            for done in range(5):
                now = 100 + 6.0 * done
                progress(done, 96)
    assert text(console).splitlines() == [
        "evaluating: 3 of 8, 0:20 left",
        "evaluating: 6 of 8, 0:08 left",
        "answering: 2 of 96, 9:24 left",  # 6 s each are more than was left of the run
        "answering: 4 of 96, 9:12 left",
    ]


def test_what_is_left_of_a_phase_is_not_called_what_is_left_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first step nobody knows how long the run takes."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = terminal()
    with RunView(60, console=console) as view, view.phase("answering") as progress:
        now = 5.0
        progress(32, 64)
        view.say("x")  # draws
    drawn = text(console).split("x\n", 1)[1]
    bar, doing = drawn.splitlines()[:2]
    assert bar.endswith("0%  starting")
    assert "answering: 32 of 64, 0:05 left" in doing


def test_what_stays_in_a_terminal_is_how_the_run_ended() -> None:
    console = terminal()
    with RunView(2, console=console) as view:
        view.step(2, result(), READING)
        with view.phase("saving the result", 1.0):
            view.say("x")
    last = text(console).rsplit("step 2/2", 1)[1]
    assert "left" not in last
    assert "saving" not in last
    assert "100%" in last


def test_a_terminal_shows_a_phase_and_what_is_left_of_the_run() -> None:
    console = terminal()
    with RunView(60, console=console) as view, view.phase("evaluating", 391.0) as progress:
        progress(0, 12)
        view.say("x")  # draws
    written = text(console)
    assert "evaluating: 0 of 12" in written
    assert "6:31 left" in written
