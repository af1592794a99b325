"""Pipeline parallelism: ranks hold stages of consecutive layers, and micro-batches flow through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.section import Section
from shardtune.core.setup import EngineSetup
from shardtune.core.world import World
from shardtune.parallel.axis_rules import PipelineSchedule, pipeline_rule, pipelining, tensor_rule

if TYPE_CHECKING:
    from shardtune.core.engine import Engine


class Pipeline(Section):
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

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        from shardtune.parallel.pipeline.engine import PipelineEngine

        return PipelineEngine(builder, setup, world, self.layout(), self.mesh(world.size))
