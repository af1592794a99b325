"""`save`: what a run leaves behind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardtune.config.sections.field_types import NotNegative, Positive
from shardtune.config.sections.watched_metric_section import BestCheckpoint
from shardtune.core.job_section import Section


class SaveSection(Section):
    """What a run leaves behind."""

    directory: Annotated[str, Field(min_length=1)] = "runs/shardtune"
    """The run directory. One that holds a run is never overwritten without being told."""
    every: NotNegative = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: Positive = 2
    """Checkpoints that are kept; older ones are removed once a newer one is complete."""
    best: BestCheckpoint | None = None
    """Keep the checkpoint of the step with the best value of a metric, beside those of `keep`, and
    write the result from it. Null writes the result from the last step."""
    background: bool = True
    """Asynchronous checkpoints: copy the state to CPU memory and write it while training goes on.
    Each rank needs CPU memory for its shard of a checkpoint, from the first step on if `every` is
    set; false needs none, and training waits for the write."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint can't be written: report it and train on until the next one is
    due, or stop. The last checkpoint of a run has to succeed in any case."""
    trace: bool = False
    """Write `trace.jsonl`: for each step its loss, gradient norm and learning rate to the bit, and
    digests of samples, RNG states, weights and optimizer states. For proofs: it gathers the whole
    state in every step."""
