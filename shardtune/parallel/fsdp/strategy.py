"""Fully sharded data parallelism (PyTorch's FSDP2), over all ranks or over groups of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.layout import AxisRule, Home, Layout, Move, State
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.section import Section
from shardtune.core.setup import EngineSetup
from shardtune.core.world import World
from shardtune.parallel.axis_rules import pipeline_rule, pipelining, tensor_rule

if TYPE_CHECKING:
    from shardtune.core.engine import Engine


class FSDP(Section):
    """Weights, gradients and optimizer states in shares; a layer is gathered when it is needed."""

    type: Literal["fsdp"] = "fsdp"
    sharding: Literal["full", "hybrid"] = "full"
    """`full` divides over all ranks. `hybrid` divides within groups and repeats the groups: only
    gradients cross between them, which suits slow links between nodes."""
    replicas: Annotated[int, Field(ge=1)] | None = None
    """How many groups `hybrid` forms; each has ranks / replicas ranks."""
    offload: Literal["none", "cpu"] = "none"
    """Keep the shares in main memory and bring them to the device when needed: slow, but fits."""
    reshard_after_forward: bool = True
    """Let a layer's gathered weights go after the forward pass. False keeps them for the backward
    pass: half the gathering, at the price of memory for all weights."""

    tensor: Annotated[int, Field(ge=1)] = 1
    """Over how many neighbouring ranks each layer is sliced first, as `type: tensor` does; what is
    divided into shares is then a slice."""
    pipeline: Annotated[int, Field(ge=1)] = 1
    """Into how many stages the layers are divided first, as `type: pipeline` does; the layers of a
    stage are then divided into shares."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """The order in which stages work, as in `type: pipeline`."""
    chunks: Annotated[int, Field(ge=2)] = 2
    """Stages of each rank under `interleaved`."""

    def mesh(self, ranks: int) -> Mesh:
        replicas = (self.replicas or 1) if self.sharding == "hybrid" else 1
        fixed = {"pipeline": self.pipeline, "replicate": replicas, "tensor": self.tensor}
        return Mesh.around(fixed, "shard", ranks)

    def layout(self) -> Layout:
        again = [Move("all_gather", "recalled", "micro_batch")]
        shard = AxisRule(
            "shard",
            divides=frozenset({"params", "grads", "optim"}),
            moves=(
                Move("all_gather", "params", "micro_batch"),
                *(again if self.reshard_after_forward else []),
                Move("reduce_scatter", "grads", "micro_batch"),
            ),
        )
        replicate = AxisRule("replicate", moves=(Move("all_reduce", "grads", "micro_batch"),))
        states: tuple[State, ...] = ("params", "grads", "optim")
        home: dict[State, Home] = dict.fromkeys(states, "cpu") if self.offload == "cpu" else {}
        slices = [tensor_rule()] if self.tensor > 1 else []
        if self.pipeline == 1:
            return Layout((replicate, shard, *slices), home)
        order = pipelining(self.schedule, self.chunks)
        return Layout((pipeline_rule(), replicate, shard, *slices), home, pipelining=order)

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        from shardtune.parallel.fsdp.engine import FSDPEngine
        from shardtune.parallel.pipeline.engine import PipelineEngine

        return (PipelineEngine if self.pipeline > 1 else FSDPEngine)(
            builder,
            setup,
            world,
            self.layout(),
            self.mesh(world.size),
            reshard_after_forward=self.reshard_after_forward,
        )
