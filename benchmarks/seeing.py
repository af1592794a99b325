"""What seeing costs a run: `python -m benchmarks.seeing`.

Each part of what follows a step is timed by itself, by the thread's own clock, so that others on
the machine don't count. The page is written once, at the end.
"""

from __future__ import annotations

import io
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.table import write_table
from shardtune.checkpoint.run_logs import RunLogs
from shardtune.core.runs.curve_warnings import CurveWatch
from shardtune.core.runs.metrics import StepMetrics
from shardtune.core.runs.step_parts import ACCOUNT, StepParts, mean_parts
from shardtune.core.step import Reading, StepResult
from shardtune.report.live import RunView
from shardtune.report.run_page import write_run_page

STEP_SECONDS = 0.05
LIMIT = 0.005  # of such a step
STEPS = 2000
LONG = 100_000
IDLE_SECONDS = 5.0
READING = Reading(0.05, 1e5, 100.0, 40.0, 0.98)
PARTS_OF_8 = StepParts(steps=20, ranks=(mean_parts([1.0] * (len(ACCOUNT) - 1) + [4096], 20),) * 8)


def result(step: int) -> StepResult:
    return StepResult(1 + math.exp(-step / 500), 0.5, 1e-4, 16_384, 8_192, busy=0.049)


def line(step: int) -> StepMetrics:
    """Every twentieth has the parts of 8 ranks: one a second at 50 ms a step."""
    parts = PARTS_OF_8 if step % 20 == 0 else None
    return StepMetrics.of(
        step, result(step), READING, epoch=0.1, samples_sha256="0" * 64, parts=parts
    )


def microseconds(work: Callable[[int], object]) -> float:
    """The mean of a step, in the calmest of five stretches."""
    stretches = []
    first = 1
    for _ in range(5):
        begun = time.thread_time()
        for step in range(first, first + STEPS):
            work(step)
        stretches.append((time.thread_time() - begun) / STEPS * 1e6)
        first += STEPS
    return min(stretches)


def redraw_share() -> float:
    """The share of a processor that the live view takes while nothing else happens."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with RunView(STEPS, console=console) as view:
        view.step(1, result(1), READING)
        begun = time.process_time()
        time.sleep(IDLE_SECONDS)
        return (time.process_time() - begun) / IDLE_SECONDS


def page_seconds(steps: int, folder: Path) -> tuple[float, int]:
    """How long the page of a run takes, and its bytes."""
    folder.mkdir()
    text = "".join(line(step).to_json(ascii_only=True) + "\n" for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    begun = time.thread_time()
    page = write_run_page(folder, "done")
    return time.thread_time() - begun, page.stat().st_size


def main() -> int:
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        logs = RunLogs(folder / "metrics.jsonl", folder / "trace.jsonl")
        watch = CurveWatch()
        lines = [line(step) for step in range(1, STEPS * 5 + 1)]
        costs = {
            "a line of `metrics.jsonl`": microseconds(lambda step: logs.log(line(step))),
            "curves that warn": microseconds(lambda step: watch.see(lines[step - 1])),
        }
        for name, terminal in (("plain lines", False), ("the live view", True)):
            console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
            with RunView(STEPS * 5, console=console) as view:
                costs[name] = microseconds(lambda step, v=view: v.step(step, result(step), READING))
        pages = {n: page_seconds(n, folder / str(n)) for n in (1000, LONG)}
        redrawing = redraw_share()
    worst = costs["a line of `metrics.jsonl`"] + costs["curves that warn"]
    worst += max(costs["plain lines"], costs["the live view"])
    share = worst / 1e6 / STEP_SECONDS
    rows = [
        (name, f"{cost:.0f} µs", f"{cost / 1e6 / STEP_SECONDS:.3%}") for name, cost in costs.items()
    ]
    rows.append(("**all, with the dearer view**", f"{worst:.0f} µs", f"{share:.3%}"))
    rows.append(("redrawing the live view, by its thread", "", f"{redrawing:.3%}"))
    for steps, (seconds, size) in pages.items():
        of_run = seconds / (steps * STEP_SECONDS)
        what = f"`report.html` after {steps:,} steps ({size / 1000:.0f} kB)"
        rows.append((what, f"{seconds:.2f} s, once", f"{of_run:.3%} of the run"))
    total = share + redrawing + pages[LONG][0] / (LONG * STEP_SECONDS)
    note = (
        f"By the thread's own clock, in the calmest of five stretches of {STEPS:,} steps. The "
        f"limit is {LIMIT:.1%} of a 50 ms step for all of it. A run of {LONG:,} steps in a "
        f"terminal pays {total:.2%}, page and redrawing included."
    )
    write_table(
        "seeing", "What seeing a run costs", ("part", "cost", "of a 50 ms step"), rows, note
    )
    return int(total >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
