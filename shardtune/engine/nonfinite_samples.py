"""Non-finite steps: which samples are to blame for NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardtune.core.step import MicroBatch, StepResult
from shardtune.core.world import World


def nonfinite_samples(
    microbatches: Sequence[MicroBatch],
    result: StepResult,
    world: World,
    overflowing: Callable[[], Sequence[bool]],
) -> tuple[str, ...]:
    """This rank's samples whose loss isn't finite. If every rank's loss is, `overflowing` says
    which micro-batches make a gradient that isn't."""
    guilty: Sequence[bool] = [not math.isfinite(loss) for loss in result.losses]
    seen = torch.tensor([int(any(guilty))])
    if world.size > 1:
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    if not seen:  # every loss was a number: it is a gradient that wasn't
        guilty = overflowing()
    # A pipeline has empty micro-batches behind these, and losses on its last rank only.
    wrong = (batch for batch, bad in zip(microbatches, guilty, strict=False) if bad)
    return tuple(sample for batch in wrong for sample in batch.samples)
