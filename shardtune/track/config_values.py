"""A job as trackers show it. Apart from the rest, because a tracker's process needs no job."""

from __future__ import annotations

from shardtune.config.job import Job
from shardtune.config.job_file import leaves
from shardtune.core.files.yaml_document import dotted
from shardtune.track.sink import ConfigValue


def config_values(job: Job) -> dict[str, ConfigValue]:
    """The values of a job by their dotted path."""
    found = {dotted(path): value for path, value in leaves(job.model_dump(mode="json"))}
    plain = (str, int, float, bool, type(None))
    return {key: each if isinstance(each, plain) else str(each) for key, each in found.items()}
