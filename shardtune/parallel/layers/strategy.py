"""Layers on different ranks, the naive way: one micro-batch at a time, the other ranks wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.capabilities import Capabilities
from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.core.setup import EngineSetup
from shardtune.core.strategy import StrategyBase
from shardtune.core.world import World
from shardtune.parallel.axis_rules import pipeline_rule
from shardtune.parallel.capability_limits import WHOLE_COPIES, divided, staged

if TYPE_CHECKING:
    from shardtune.core.engine import Engine

_CAPABILITIES = staged(divided(WHOLE_COPIES, "layers"), "layers")


class Layers(StrategyBase):
    """Naive model parallelism: consecutive layers on different ranks, each of which works 1/N of
    the time. For comparison; `pipeline` holds the same and waits less."""

    type: Literal["layers"] = "layers"
    stages: Annotated[int, Field(ge=2)]
    """Over how many ranks the layers are divided. Further ranks are data-parallel."""

    def mesh(self, ranks: int) -> Mesh:
        return Mesh.around({"pipeline": self.stages}, "data", ranks)

    def layout(self) -> Layout:
        data = AxisRule("data", moves=(Move("all_reduce", "grads", "step"),))
        return Layout((pipeline_rule(), data), pipelining=Pipelining("layers"))

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        from shardtune.parallel.pipeline.engine import PipelineEngine

        return PipelineEngine(builder, setup, world, self.layout(), self.mesh(world.size))
