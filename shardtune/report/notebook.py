"""The live view in a notebook: the run's panel as a cell's output, drawn anew in place.

A notebook's process only watches: the ranks are processes of their own, and what they have done is
read from the run directory.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.runs.metrics import EvaluationMetrics, MetricsLine, StepMetrics, TaskMetrics
from shardtune.core.runs.metrics_log import follow
from shardtune.report.run_panel import RunPanel, StepNumbers

PANEL_WIDTH = 100  # columns
LOOK_SECONDS = 1.0  # between two looks at the run


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")  # the second is Colab's


@contextmanager
def notebook_view(directory: Path, steps: int | None) -> Iterator[None]:
    """Shows the run in `directory` as long as the block lasts; None if nobody knows its steps."""
    over = threading.Event()
    panel = RunPanel(steps or 0)
    thread = threading.Thread(target=_draw, args=(directory, panel, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _draw(directory: Path, panel: RunPanel, over: threading.Event) -> None:
    from IPython.display import HTML, display  # type: ignore[import-not-found,unused-ignore]

    position = follow(directory).position  # an earlier run's lines
    shown: Any = display(HTML(as_html(panel)), display_id=True)
    while True:
        last = over.wait(LOOK_SECONDS)
        found = follow(directory, position)
        position = found.position
        for line in found.lines:
            show_line(panel, line)
        panel.over = last
        with suppress(Exception):  # a page that was closed is no reason to lose a run
            shown.update(HTML(as_html(panel)))
        if last:
            return


def show_line(panel: RunPanel, line: MetricsLine) -> None:
    """What a line of the metrics changes in the panel."""
    if isinstance(line, StepMetrics):
        numbers = StepNumbers(
            float("nan") if line.loss is None else line.loss,
            line.learning_rate,
            float("nan") if line.grad_norm is None else line.grad_norm,
            line.tokens_per_second,
            line.memory_gib,
            line.utilisation,
        )
        panel.step(line.step, numbers, line.seconds_left)
    elif isinstance(line, EvaluationMetrics):
        figures = EvalFigures(
            loss=line.loss,
            perplexity=line.perplexity,
            accuracy=line.accuracy,
            labels=line.labels,
        )
        panel.evaluation(line.set, figures)
    elif not isinstance(line, TaskMetrics):
        panel.warn(f"step {line.step}: {line.fact}")


def as_html(panel: RunPanel) -> str:
    """The panel as HTML that stands by itself."""
    console = Console(file=io.StringIO(), record=True, width=PANEL_WIDTH, force_jupyter=False)
    console.print(panel)
    style = "font-family: monospace; line-height: 1.3; overflow-x: auto"
    code = console.export_html(inline_styles=True, code_format="<code>{code}</code>")
    return f'<pre style="{style}">{code}</pre>'
