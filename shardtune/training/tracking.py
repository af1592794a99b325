"""The trackers of a run, for whoever starts its ranks, or for rank 0 where others have."""

from __future__ import annotations

import sys
from collections.abc import Callable

from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import Job
from shardtune.track.config_values import config_values
from shardtune.track.tracker_state import TRACK_FOLDER
from shardtune.track.watch import Trackers


def tracking(
    job: Job, files: RunDir, *, wanted: bool, say: Callable[[str], None] | None = None
) -> Trackers:
    """A context in which the job's trackers follow the run in `files`, which has to be ours by now.
    Unless it is `wanted`, none does."""
    say = say or _say
    if not wanted or not job.track:
        return Trackers((), {}, files.path, "", say)
    files.own(TRACK_FOLDER)
    return Trackers(job.track, config_values(job), files.path, files.run_id() or "", say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
