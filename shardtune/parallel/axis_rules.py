"""Axis rules that strategies compose: an axis of slices (tensor), an axis of stages (pipeline)."""

from __future__ import annotations

from typing import Literal

from shardtune.core.layout import AxisRule, Move
from shardtune.core.pipeline_schedule import Pipelining

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


def tensor_rule() -> AxisRule:
    """What the axis of slices divides and sends, in whatever it is combined with."""
    gathered = Move("all_gather", "hidden", "micro_batch", per="layer")
    added = Move("reduce_scatter", "hidden", "micro_batch", per="layer")
    return AxisRule(
        "tensor",
        divides=frozenset({"params", "grads", "optim", "activations"}),
        by="slices",
        moves=(
            # Attention and MLP each gather all tokens and add up their results; the backward pass
            # mirrors both. What the first layer hands back is wanted only by a trained embedding.
            *(gathered for _ in range(4)),
            *(added for _ in range(3)),
            Move("reduce_scatter", "hidden", "micro_batch", per="return"),
            # Looked up words are added up, and their gradients gathered.
            Move("all_reduce", "hidden", "micro_batch", per="start"),
            Move("all_gather", "embedded", "micro_batch", per="start"),
            # The head needs all tokens; the loss one number and then two of each trained token.
            Move("all_gather", "hidden", "micro_batch", per="end"),
            Move("reduce_scatter", "hidden", "micro_batch", per="end"),
            Move("all_reduce", "scores", "micro_batch", 3.0, per="end"),
            # Between stages what flows is whole.
            Move("all_gather", "hidden", "micro_batch", per="border"),
            Move("all_reduce", "unsliced", "step"),
        ),
    )


def pipeline_rule() -> AxisRule:
    """What the axis of stages divides and sends, in whatever it is combined with."""
    return AxisRule(
        "pipeline",
        divides=frozenset({"params", "grads", "optim", "activations"}),
        by="layers",
        moves=(
            Move("send_recv", "hidden", "micro_batch", per="border"),
            # A head that is the embedding too lies on the first and on the last stage.
            Move("all_reduce", "tied", "step"),
        ),
    )


def pipelining(schedule: PipelineSchedule, chunks: int) -> Pipelining:
    """The schedule as arithmetic."""
    stages_of_a_rank = {"interleaved": chunks, "zero_bubble": 2}.get(schedule, 1)
    return Pipelining(schedule, stages_of_a_rank)
