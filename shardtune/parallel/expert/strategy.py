"""Expert parallelism: experts of every layer divided over ranks, which send each other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.capabilities import Capabilities
from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import WORLD, Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.strategy import Choice, Devices, StrategyBase
from shardtune.core.world import World
from shardtune.parallel.axis_rules import expert_counts, expert_rule
from shardtune.parallel.capability_limits import WHOLE_COPIES, not_whole, routed
from shardtune.parallel.ddp.strategy import DDP

if TYPE_CHECKING:
    from shardtune.core.engine import Engine
    from shardtune.core.model.shape import ModelShape

_CAPABILITIES = routed(not_whole(WHOLE_COPIES, "expert"), "expert")


class Expert(StrategyBase):
    """Expert parallelism: each rank holds some experts of every layer, and all other weights
    whole."""

    type: Literal["expert"] = "expert"
    degree: Annotated[int, Field(ge=1)]
    """Over how many ranks the experts of a layer are divided. They exchange tokens (all-to-all)
    four times per layer: keep them in one node. It has to divide the number of experts. Further
    ranks are data-parallel."""

    def mesh(self, ranks: int) -> Mesh:
        return Mesh.around({"expert": self.degree}, "data", ranks)

    def layout(self) -> Layout:
        summed = (Move("all_reduce", "grads", "step"),)
        twins = AxisRule("data", moves=summed, of="experts")
        return Layout((twins, expert_rule(), AxisRule(WORLD, moves=summed, of="others")))

    @property
    def capabilities(self) -> Capabilities:
        return WHOLE_COPIES if self.degree == 1 else _CAPABILITIES

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        if self.degree == 1:
            return DDP().build(builder, setup, world)
        from shardtune.parallel.expert.engine import ExpertEngine

        return ExpertEngine(builder, setup, world, self.mesh(world.size))

    @classmethod
    def candidates(cls, shape: ModelShape, devices: Devices) -> Iterator[Choice]:
        for n in expert_counts(shape, devices):
            yield Choice("expert", f"expert({n})", cls(degree=n), 32)
