"""Axis rules that strategies compose: axes of slices (tensor), of experts, of stages (pipeline).

With each goes what a model and devices allow of it, for the planner to try.
"""

from __future__ import annotations

from typing import Literal

from shardtune.core.layout import AxisRule, Move
from shardtune.core.model.parallel_plan import SHARDABLE_FAMILIES, degrees_of
from shardtune.core.model.shape import ModelShape
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.core.strategy import Devices
from shardtune.errors import Problem

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


def expert_rule() -> AxisRule:
    """What the axis of experts divides and sends, in whatever it is combined with. It says nothing
    of the other weights, with which every rank sees rows of its own."""
    exchanged = Move("all_to_all", "routed", "micro_batch", per="mixture")
    return AxisRule(
        "expert",
        divides=frozenset({"params", "grads", "optim"}),
        by="experts",
        # Tokens go to their experts and results come back; the backward pass mirrors both.
        moves=tuple(exchanged for _ in range(4)),
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


def chunk_problems(schedule: PipelineSchedule, chunks: int, usual: int) -> list[Problem]:
    """Stages of each rank, where somebody has set a number that the schedule has no use for."""
    if schedule == "interleaved" or chunks == usual:
        return []
    fact = f"is {chunks}, the number of stages of a rank under schedule: interleaved only"
    return [Problem("strategy.chunks", fact, "set schedule: interleaved, or leave chunks out")]


def slice_degrees(shape: ModelShape, devices: Devices) -> list[int]:
    """Over how many ranks of a node the layers of a model can be sliced."""
    return [n for n in degrees_of(shape) if n > 1 and devices.per_node % n == 0]


def expert_counts(shape: ModelShape, devices: Devices) -> list[int]:
    """Over how many ranks of a node the experts of a layer can be divided; none where a model has
    no experts."""
    count = shape.experts.count if shape.experts else 0
    degrees = range(2, min(count, devices.per_node) + 1)
    return [n for n in degrees if count % n == 0 and devices.per_node % n == 0]


def stage_counts(shape: ModelShape, devices: Devices) -> list[int]:
    """Over how many ranks the layers can be divided. None where nobody has said how the model is
    cut."""
    if shape.family not in SHARDABLE_FAMILIES:
        return []
    deepest = min(shape.layers, devices.count)
    return [n for n in range(2, deepest + 1) if devices.count % n == 0]
