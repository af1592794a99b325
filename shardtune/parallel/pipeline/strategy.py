"""Pipeline parallelism: ranks hold stages of consecutive layers, and micro-batches flow through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.capabilities import Capabilities
from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.strategy import Choice, Devices, StrategyBase
from shardtune.core.world import World
from shardtune.errors import Problem
from shardtune.parallel.axis_rules import (
    PipelineSchedule,
    chunk_problems,
    pipeline_rule,
    pipelining,
    slice_degrees,
    stage_counts,
    tensor_rule,
)
from shardtune.parallel.capability_limits import WHOLE_COPIES, divided, sliced, staged

if TYPE_CHECKING:
    from shardtune.core.engine import Engine
    from shardtune.core.model.shape import ModelShape


class Pipeline(StrategyBase):
    """Consecutive layers on different ranks, all of which work at once on other micro-batches."""

    type: Literal["pipeline"] = "pipeline"
    stages: Annotated[int, Field(ge=2)]
    """Over how many ranks the layers are divided. Ranks beyond them make data parallelism."""
    schedule: PipelineSchedule = "1f1b"
    """`gpipe` runs all forward passes, then all backward passes. `1f1b` alternates, and so keeps
    the activations of fewer micro-batches. `interleaved` gives every rank several stages and waits
    less. `zero_bubble` gives every rank two and computes gradients of weights while others wait."""
    chunks: Annotated[int, Field(ge=2)] = 2
    """Stages of each rank under `interleaved`."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Over how many ranks each layer of a stage is sliced."""

    def mesh(self, ranks: int) -> Mesh:
        return Mesh.around({"pipeline": self.stages, "tensor": self.tensor}, "data", ranks)

    def layout(self) -> Layout:
        data = AxisRule("data", moves=(Move("all_reduce", "grads", "step"),))
        rules = (pipeline_rule(), data, *([tensor_rule()] if self.tensor > 1 else []))
        return Layout(rules, pipelining=pipelining(self.schedule, self.chunks))

    @property
    def capabilities(self) -> Capabilities:
        return _capabilities(self.tensor)

    def problems(self, ranks: int) -> list[Problem]:
        usual = int(type(self).model_fields["chunks"].default)
        found = chunk_problems(self.schedule, self.chunks, usual)
        if self.schedule == "zero_bubble" and self.tensor > 1:
            fact = (
                "zero_bubble computes gradients of weights apart from those of inputs, which torch "
                f"can't do for the slices of tensor({self.tensor})"
            )
            fix = "use schedule: interleaved, which waits little too, or tensor: 1"
            found.append(Problem("strategy.tensor", fact, fix))
        return [*found, *super().problems(ranks)]

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        from shardtune.parallel.pipeline.engine import PipelineEngine

        return PipelineEngine(builder, setup, world, self.layout(), self.mesh(world.size))

    @classmethod
    def candidates(cls, shape: ModelShape, devices: Devices) -> Iterator[Choice]:
        stages = stage_counts(shape, devices)
        for n in stages:
            yield Choice("pipeline", f"pipeline({n})", cls(stages=n), 32)
        most = max(slice_degrees(shape, devices), default=1)
        for n in stages:
            if most > 1 and devices.count % (n * most) == 0:
                name = f"pipeline({n}) + tensor({most})"
                yield Choice("pipeline + tensor", name, cls(stages=n, tensor=most), 34)


@cache
def _capabilities(slices: int) -> Capabilities:
    name = "pipeline"
    found = replace(divided(WHOLE_COPIES, name), combines=frozenset({"tensor"}))
    return staged(sliced(found, name, slices) if slices > 1 else found, name)
