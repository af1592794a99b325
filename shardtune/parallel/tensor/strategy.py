"""Tensor parallelism: ranks hold slices of every layer; ranks beyond them have their own rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.section import Section
from shardtune.core.setup import EngineSetup
from shardtune.core.world import World
from shardtune.parallel.axis_rules import tensor_rule
from shardtune.parallel.ddp.strategy import DDP

if TYPE_CHECKING:
    from shardtune.core.engine import Engine


class Tensor(Section):
    """Every matrix in slices: weights, gradients, optimizer states and activations with it."""

    type: Literal["tensor"] = "tensor"
    degree: Annotated[int, Field(ge=1)]
    """Over how many ranks a layer is sliced. They talk several times a layer: keep them in one
    node. It has to divide the model's heads. Ranks beyond it make data parallelism."""

    def mesh(self, ranks: int) -> Mesh:
        return Mesh.around({"tensor": self.degree}, "data", ranks)

    def layout(self) -> Layout:
        data = AxisRule("data", moves=(Move("all_reduce", "grads", "step"),))
        return Layout((data, tensor_rule()))

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        if self.degree == 1:  # one slice is the whole model
            return DDP().build(builder, setup, world)
        from shardtune.parallel.tensor.engine import TensorEngine

        return TensorEngine(builder, setup, world, self.mesh(world.size))
