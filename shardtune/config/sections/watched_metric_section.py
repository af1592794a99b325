"""`train.early_stop` and `save.best`: what is decided by a metric that the run measures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardtune.config.sections.field_types import Auto, Positive
from shardtune.core.job_section import Section


class WatchedMetric(Section):
    """A metric that the run measures while training."""

    metric: Annotated[str, Field(min_length=1)] = "loss"
    """`loss`, `perplexity` or `accuracy` of all held-out sets together, `SET.loss` of one of them,
    or the name of a task (`evaluate.tasks`)."""
    goal: Auto | Literal["min", "max"] = "auto"
    """Whether less or more of it is better. `auto`: less loss and perplexity, more of anything
    else."""


class EarlyStop(WatchedMetric):
    """Early stopping: ends a run whose metric has stopped improving."""

    patience: Positive = 3
    """Evaluations in a row without an improvement after which the run ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """A change counts as an improvement if it is larger."""


class BestCheckpoint(WatchedMetric):
    """Writes the result from the step with the best metric."""
