"""The live stream of a run: server-sent events that say what has changed.

An event has the run's row; the page fetches the thinned curves itself, so that a slow browser
skips some and never falls behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

from shardtune.core.record import Record
from shardtune.dashboard.open_run import OpenRun
from shardtune.dashboard.run_row import RunRow, RunSummary
from shardtune.web.replies import event_of

_LOOK_SECONDS = 0.5
SUMMARY_SECONDS = 5.0  # between two looks for an end that leaves no line in the metrics
KEEP_ALIVE = 15.0  # seconds between two signs of life


class LiveEvent(Record):
    """What the page is told."""

    kind: Literal["changed", "gone"]
    run: RunRow | None


async def live_events(
    run: OpenRun,
    summary: Callable[[], RunSummary | None],
    stopping: Callable[[], bool],
) -> AsyncIterator[bytes]:
    """Events until the run is gone, the server stops, or nobody listens."""
    seen: tuple[int, int, int] | None = None
    row: RunRow | None = None
    looked = spoken = 0.0
    while not stopping():
        version = await asyncio.to_thread(run.version)
        now = time.monotonic()
        if version != seen or now - looked >= SUMMARY_SECONDS:
            looked = now
            found = await asyncio.to_thread(summary)
            if found is None:
                yield event_of(LiveEvent(kind="gone", run=None).model_dump_json())
                return
            if version != seen or found.row != row:
                seen, row, spoken = version, found.row, now
                yield event_of(LiveEvent(kind="changed", run=row).model_dump_json())
        if now - spoken >= KEEP_ALIVE:
            spoken = now
            yield b": still here\n\n"
        await asyncio.sleep(_LOOK_SECONDS)
