"""Opens a tracker for a run: the same run of the tracker as before, or a new one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shardtune.core.redact import redact
from shardtune.core.tracker import TrackerBase
from shardtune.errors import Problem, RunError
from shardtune.track.feed import Feed
from shardtune.track.sink import ConfigValue, TrackedRun, open_sink
from shardtune.track.tracker_state import (
    TRACK_FOLDER,
    TrackerState,
    read_tracker_state,
    write_tracker_state,
)


@contextmanager
def open_feed(
    section: TrackerBase,
    run_dir: Path,
    run: str,
    label: str,
    config: Mapping[str, ConfigValue],
    *,
    anew: bool = False,
) -> Iterator[Feed]:
    """The feed of the tracker `label` for a run, which no other process has meanwhile. With `anew`
    it begins another run there."""
    folder = run_dir / TRACK_FOLDER / label
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder):
        state = None if anew else read_tracker_state(run_dir, label, run)
        tracked = TrackedRun(
            name=run_dir.resolve().name,
            folder=folder.absolute(),
            id=None if state is None else state.id,
            next_step=1 if state is None else state.sent.get("step", 0) + 1,
            config={key: _without_secrets(value) for key, value in config.items()},
        )
        sink = open_sink(section, tracked)
        if state is None:
            state = TrackerState(run=run, id=sink.id)
            write_tracker_state(run_dir, label, state, durable=True)
        yield Feed(run_dir, label, sink, state)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Locks the folder: two processes would send everything twice."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        fact = "another process feeds this tracker now"
        raise RunError(Problem(str(folder), fact, "wait for the run's end")) from None
    finally:
        os.close(descriptor)


def _without_secrets(value: ConfigValue) -> ConfigValue:
    return redact(value, os.environ) if isinstance(value, str) else value
