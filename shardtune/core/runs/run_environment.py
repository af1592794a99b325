"""The content of `environment.json`: with what a run was made, and of which data."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.core.record import Record


class GitRevision(Record):
    """The checkout that a run was started in."""

    revision: str
    changed: bool
    """Whether files differ from it."""


class RunEnvironment(Record):
    """Versions, machine, git revision. No environment variables: they hold secrets."""

    shardtune: str
    python: str
    packages: Mapping[str, str]
    platform: str
    cores: int
    gpus: tuple[str, ...]
    ranks: int
    git: GitRevision | None
    """None outside of a checkout."""
    run: str
    """Drawn for each run: whose the checkpoints are."""
    data: Mapping[str, str]
    """The digest of each data set."""
