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
    """Consecutive layers on different ranks, with several micro-batches in flight."""

    type: Literal["pipeline"] = "pipeline"
    stages: Annotated[int, Field(ge=2)]
    """Pipeline-parallel degree: over how many ranks the layers are divided. Further ranks are
    data-parallel."""
    schedule: PipelineSchedule = "1f1b"
    """`gpipe` runs all forward passes, then all backward passes. `1f1b` alternates, and so keeps
    the activations of fewer micro-batches. `interleaved` gives each rank several stages, for a
    smaller bubble. `zero_bubble` gives each rank two, and computes weight gradients in the
    bubble."""
    chunks: Annotated[int, Field(ge=2)] = 2
    """Stages of each rank under `interleaved`."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel degree: over how many ranks each layer of a stage is sharded."""

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
                "zero_bubble computes weight gradients separately from input gradients, which "
                f"torch can't do for weights sharded by tensor({self.tensor})"
            )
            fix = "use schedule: interleaved, whose bubble is small too, or tensor: 1"
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
    if slices > 1:
        found = sliced(found, f"{name} with tensor: {slices}", slices)
    return staged(found, name)
