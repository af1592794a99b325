"""The sink of Trackio: a local SQLite file, or a Space of the Hugging Face hub."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

from shardtune.config.trackers import Trackio
from shardtune.track.sink import Cell, TrackedRun

TURN_SECONDS = 1.0


class TrackioSink:
    """A run of Trackio, which knows it by its name: ours gets a few letters that no other has."""

    def __init__(self, section: Trackio, run: TrackedRun) -> None:
        import trackio

        self.id = run.id or section.name or f"{run.name}-{secrets.token_hex(3)}"
        self._table = trackio.Table
        self._run = trackio.init(
            project=section.project,
            name=self.id,
            space_id=section.space_id,
            config=dict(run.config),
            resume="allow" if run.id is not None else "never",
            embed=False,
            # It would measure this process, not the ranks.
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log(dict(values), step=step)

    def note(self, step: int, name: str, text: str) -> None:
        self._run.log({name: text}, step=step)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
    ) -> None:
        table = self._table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def flush(self) -> None:
        """A thread of Trackio's takes what it was given twice a second, and tells nobody."""
        time.sleep(TURN_SECONDS)

    def close(self, *, finished: bool) -> None:
        self._run.finish()
