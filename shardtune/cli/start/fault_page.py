"""The page of a run that came to no report: killed, failed or preempted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardtune.cli.say import say

if TYPE_CHECKING:
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.core.runs.run_state import RunState


@contextmanager
def leaving_page(
    run: RunDir, *, wanted: bool = True, stopped: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Writes the page when the block fails, or ends because the run was `stopped`. One that comes
    to its end writes its own."""
    try:
        yield
    except BaseException:
        if wanted:
            _write(run, "failed")
        raise
    if wanted and stopped():
        _write(run, "stopped")


def _write(run: RunDir, state: RunState) -> None:
    from shardtune.report.run_page import PAGE_FILE, try_write_run_page

    if run.owns(PAGE_FILE) and run.read_report() is None:
        try_write_run_page(run.path, say, state)
