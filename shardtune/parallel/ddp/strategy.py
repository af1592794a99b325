"""Data parallelism: every rank holds the whole model and a share of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from shardtune.core.capabilities import Capabilities
from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.strategy import Choice, Devices, StrategyBase
from shardtune.core.world import World
from shardtune.parallel.capability_limits import WHOLE_COPIES

if TYPE_CHECKING:
    from shardtune.core.engine import Engine
    from shardtune.core.model.shape import ModelShape


class DDP(StrategyBase):
    """Whole model on every rank; gradients are averaged once per step."""

    type: Literal["ddp"] = "ddp"

    def mesh(self, ranks: int) -> Mesh:
        return Mesh((("data", ranks),))

    def layout(self) -> Layout:
        return Layout((AxisRule("data", moves=(Move("all_reduce", "grads", "step"),)),))

    @property
    def capabilities(self) -> Capabilities:
        return WHOLE_COPIES

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        from shardtune.parallel.ddp.engine import native_engine

        return native_engine(builder.whole(world.device), setup, world)

    @classmethod
    def candidates(cls, shape: ModelShape, devices: Devices) -> Iterator[Choice]:
        name = "ddp" if devices.count > 1 else "one GPU"
        yield Choice(name, name, cls(), 0)
        if devices.count == 1 and devices.gpu:
            paged = "one GPU, optimizer states in host memory"
            yield Choice(paged, paged, cls(), 39, pages_optimizer=True)
