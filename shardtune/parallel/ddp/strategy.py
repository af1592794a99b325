"""Data parallelism: every rank holds the whole model and a share of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.section import Section
from shardtune.core.setup import EngineSetup
from shardtune.core.world import World

if TYPE_CHECKING:
    from shardtune.core.engine import Engine


class DDP(Section):
    """Whole model on every rank; gradients are averaged once per step."""

    type: Literal["ddp"] = "ddp"

    def mesh(self, ranks: int) -> Mesh:
        return Mesh((("data", ranks),))

    def layout(self) -> Layout:
        return Layout((AxisRule("data", moves=(Move("all_reduce", "grads", "step"),)),))

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        from shardtune.parallel.ddp.engine import native_engine

        return native_engine(builder.whole(world.device), setup, world)
