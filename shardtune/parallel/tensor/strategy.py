"""Tensor parallelism: ranks hold slices of every layer; ranks beyond them have their own rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.capabilities import Capabilities
from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import Mesh
from shardtune.core.model.parallel_plan import SHARDABLE_FAMILIES, can_slice
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.strategy import Choice, Devices, StrategyBase
from shardtune.core.world import World
from shardtune.parallel.axis_rules import slice_degrees, tensor_rule
from shardtune.parallel.capability_limits import WHOLE_COPIES, divided, sliced
from shardtune.parallel.ddp.strategy import DDP

if TYPE_CHECKING:
    from shardtune.core.engine import Engine
    from shardtune.core.model.shape import ModelShape


class Tensor(StrategyBase):
    """Tensor parallelism: every matrix is sharded, with its gradients, optimizer states and
    activations."""

    type: Literal["tensor"] = "tensor"
    degree: Annotated[int, Field(ge=1)]
    """Over how many ranks each layer is sharded. They communicate several times per layer: keep
    them in one node. It has to divide the model's heads. Further ranks are data-parallel."""

    def mesh(self, ranks: int) -> Mesh:
        return Mesh.around({"tensor": self.degree}, "data", ranks)

    def layout(self) -> Layout:
        data = AxisRule("data", moves=(Move("all_reduce", "grads", "step"),))
        return Layout((data, tensor_rule()))

    @property
    def capabilities(self) -> Capabilities:
        if self.degree == 1:  # one slice is the whole model
            return WHOLE_COPIES
        return _capabilities(self.degree)

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        if self.degree == 1:
            return DDP().build(builder, setup, world)
        from shardtune.parallel.tensor.engine import TensorEngine

        return TensorEngine(builder, setup, world, self.mesh(world.size))

    @classmethod
    def candidates(cls, shape: ModelShape, devices: Devices) -> Iterator[Choice]:
        if devices.count > 1 and not can_slice(shape.family):
            name = "tensor" if shape.family in SHARDABLE_FAMILIES else "tensor or pipeline"
            yield Choice("cut", name, cls(degree=2), 30)  # refused, with a reason
        degrees = slice_degrees(shape, devices)
        if devices.per_node > 1 and can_slice(shape.family) and not degrees:
            degrees = [devices.per_node]  # refused, with what it doesn't divide
        for n in degrees:
            yield Choice("tensor", f"tensor({n})", cls(degree=n), 30)


@cache
def _capabilities(degree: int) -> Capabilities:
    return sliced(divided(WHOLE_COPIES, "tensor"), "tensor", degree)
