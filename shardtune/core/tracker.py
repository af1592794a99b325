"""The base of every tracker: a place that a run's figures are sent to, besides its own files.

A tracker is an item of the job's list `track`. Its section has the fields; `sink` names the class
that writes, which only the tracker's own process imports. An installed package adds one by naming
its section in the entry-point group `shardtune.trackers`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from shardtune.core.capabilities import Need
from shardtune.core.job_section import Section
from shardtune.core.redact import holds_secret

TRACKER_GROUP = "shardtune.trackers"
"""The entry points of other packages."""


class TrackerBase(Section):
    """Where a run's figures are sent."""

    type: str
    sink: ClassVar[str]
    """The class that writes there, as `package.module:Class`; `track/sink.py` says what it has."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """Packages that it imports."""
    disk_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """What the tracker may write to its folder in the run directory. One that writes more is
    stopped, and its folder removed; the run goes on."""
    finish_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long the end of a run waits for the last points to arrive. What is left then can be sent
    by `shardtune track`."""

    def fields_with_secrets(self) -> list[str]:
        """Fields whose value has a password or a token in it: they would be written to job.yaml."""
        texts = {key: value for key, value in self if isinstance(value, str)}
        return [key for key, text in texts.items() if holds_secret(text)]
