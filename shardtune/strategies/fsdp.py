"""Fully sharded data parallelism (PyTorch's FSDP2), over all ranks or over groups of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.blueprint import Blueprint
from shardtune.core.layout import AxisRule, Home, Layout, Move, State
from shardtune.core.mesh import Mesh
from shardtune.core.section import Section
from shardtune.core.setup import EngineSetup
from shardtune.core.world import World

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

    def mesh(self, ranks: int) -> Mesh:
        replicas = (self.replicas or 1) if self.sharding == "hybrid" else 1
        if replicas == 1:
            return Mesh((("shard", ranks),))
        return Mesh((("replicate", replicas), ("shard", max(1, ranks // replicas))))

    def layout(self) -> Layout:
        gathers = 2 if self.reshard_after_forward else 1
        shard = AxisRule(
            "shard",
            divides=frozenset({"params", "grads", "optim"}),
            moves=(
                *(Move("all_gather", "params", "micro_batch") for _ in range(gathers)),
                Move("reduce_scatter", "grads", "micro_batch"),
            ),
        )
        replicate = AxisRule("replicate", moves=(Move("all_reduce", "grads", "micro_batch"),))
        states: tuple[State, ...] = ("params", "grads", "optim")
        home: dict[State, Home] = dict.fromkeys(states, "cpu") if self.offload == "cpu" else {}
        return Layout((replicate, shard), home)

    def build(self, blueprint: Blueprint, setup: EngineSetup, world: World) -> Engine:
        from shardtune.engines.fsdp import FSDPEngine

        return FSDPEngine(
            blueprint,
            setup,
            world,
            self.layout(),
            self.mesh(world.size),
            reshard_after_forward=self.reshard_after_forward,
        )
