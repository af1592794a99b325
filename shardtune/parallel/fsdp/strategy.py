"""Fully sharded data parallelism (PyTorch's FSDP2), over all ranks or over groups of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardtune.core.capabilities import Capabilities
from shardtune.core.layout import AxisRule, Home, Layout, Move, State
from shardtune.core.mesh import WORLD, Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.strategy import Choice, Devices, ResolvedStrategy, StrategyBase
from shardtune.core.world import World
from shardtune.errors import Problem
from shardtune.parallel.axis_rules import (
    chunk_problems,
    expert_counts,
    expert_rule,
    pipeline_rule,
    pipelining,
    slice_degrees,
    stage_counts,
    tensor_rule,
)
from shardtune.parallel.capability_limits import (
    WHOLE_COPIES,
    divided,
    routed,
    sliced,
    staged,
)

if TYPE_CHECKING:
    from shardtune.core.engine import Engine
    from shardtune.core.model.shape import ModelShape


class FSDP(StrategyBase):
    """FSDP2: weights, gradients and optimizer states are sharded; each layer is gathered when it
    is needed."""

    type: Literal["fsdp"] = "fsdp"
    sharding: Literal["full", "hybrid"] = "full"
    """`full` shards over all ranks. `hybrid` shards within groups and replicates the groups: only
    gradients cross between them, which suits slow links between nodes."""
    replicas: Annotated[int, Field(ge=1)] | None = None
    """How many groups `hybrid` forms; each has ranks / replicas ranks. Null: one on each node, as
    torch's HYBRID_SHARD."""
    offload: Literal["none", "cpu"] = "none"
    """Keep the shards in CPU memory and copy them to the device when needed: slow, but fits."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after the forward pass. False keeps them for the backward
    pass: half the all-gathers, but memory for all weights."""

    tensor: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel degree: each layer is first sharded over so many neighbouring ranks, as
    `type: tensor` does, and FSDP then shards these parts."""
    expert: Annotated[int, Field(ge=1)] = 1
    """Expert-parallel degree: the experts of each layer are first divided over so many
    neighbouring ranks, as `type: expert` does. Ranks with the same experts shard these; all other
    weights are sharded over all ranks."""
    pipeline: Annotated[int, Field(ge=1)] = 1
    """Pipeline-parallel degree: the layers are first divided into so many stages, as `type:
    pipeline` does, and the layers of a stage are then sharded."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """The order in which stages work, as in `type: pipeline`."""
    chunks: Annotated[int, Field(ge=2)] = 2
    """Stages of each rank under `interleaved`."""

    def mesh(self, ranks: int) -> Mesh:
        replicas = (self.replicas or 1) if self.sharding == "hybrid" else 1
        fixed = {
            "pipeline": self.pipeline,
            "replicate": replicas,
            "expert": self.expert,
            "tensor": self.tensor,
        }
        return Mesh.around(fixed, "shard", ranks)

    def layout(self) -> Layout:
        again = [Move("all_gather", "recalled", "micro_batch")]
        states: tuple[State, ...] = ("params", "grads", "optim")
        shard = AxisRule(
            "shard",
            divides=frozenset(states),
            moves=(
                Move("all_gather", "params", "micro_batch"),
                *(again if self.reshard_after_forward else []),
                Move("reduce_scatter", "grads", "micro_batch"),
            ),
        )
        replicate = AxisRule("replicate", moves=(Move("all_reduce", "grads", "micro_batch"),))
        home: dict[State, Home] = dict.fromkeys(states, "cpu") if self.offload == "cpu" else {}
        if self.expert > 1:
            experts, others = replace(shard, of="experts"), replace(shard, axis=WORLD, of="others")
            return Layout((experts, expert_rule(), others), home)
        slices = [tensor_rule()] if self.tensor > 1 else []
        if self.pipeline == 1:
            return Layout((replicate, shard, *slices), home)
        order = pipelining(self.schedule, self.chunks)
        return Layout((pipeline_rule(), replicate, shard, *slices), home, pipelining=order)

    def on_nodes(self, nodes: int) -> ResolvedStrategy:
        if self.sharding != "hybrid" or self.replicas is not None:
            return ResolvedStrategy(self)
        reason = "one group on each node" if nodes > 1 else "one node: the same as sharding: full"
        found = self.model_copy(update={"replicas": nodes})
        return ResolvedStrategy(found, {("strategy", "replicas"): reason})

    @property
    def capabilities(self) -> Capabilities:
        return _capabilities(self.sharding == "full", self.tensor, self.pipeline, self.expert)

    def problems(self, ranks: int) -> list[Problem]:
        found = []
        if self.sharding == "full" and (self.replicas or 1) > 1:
            fact = f"sharding: full has one group of ranks, not {self.replicas}"
            fix = "set sharding: hybrid, or leave replicas out"
            found.append(Problem("strategy.replicas", fact, fix))
        if self.schedule != "1f1b" and self.pipeline == 1:
            fact = f"{self.schedule} is a pipeline schedule, and pipeline: 1 has only one stage"
            fix = "set pipeline to the number of stages, or leave schedule out"
            found.append(Problem("strategy.schedule", fact, fix))
        found += self._beside_experts()
        usual = int(type(self).model_fields["chunks"].default)
        found += chunk_problems(self.schedule, self.chunks, usual)
        return [*found, *super().problems(ranks)]

    def _beside_experts(self) -> list[Problem]:
        """What isn't possible together with ranks that have experts of their own."""
        if self.expert == 1:
            return []
        beside = f"together with expert: {self.expert}"
        others = {
            "sharding": (
                self.sharding == "hybrid",
                f"is hybrid {beside}, and replicated shards of experts are not implemented",
                "set sharding: full; or use type: expert, which replicates all weights but experts",
            ),
            "tensor": (
                self.tensor > 1,
                f"is {self.tensor} {beside}, and tensor parallelism of layers with experts is not "
                "implemented",
                "set tensor: 1",
            ),
            "pipeline": (
                self.pipeline > 1,
                f"is {self.pipeline} {beside}, and no pipeline schedule here waits for tokens of "
                "other ranks",
                "set pipeline: 1, or expert: 1",
            ),
            "offload": (
                self.offload == "cpu",
                f"is cpu {beside}, which has not been verified to compute the same",
                "set offload: none, or expert: 1",
            ),
        }
        return [
            Problem(f"strategy.{key}", fact, fix)
            for key, (broken, fact, fix) in others.items()
            if broken
        ]

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

    @classmethod
    def candidates(cls, shape: ModelShape, devices: Devices) -> Iterator[Choice]:
        if devices.count > 1:
            yield Choice("fsdp", "fsdp", cls(), 11)
        if devices.nodes > 1:
            hybrid = cls(sharding="hybrid", replicas=devices.nodes)
            yield Choice("fsdp hybrid", "fsdp hybrid", hybrid, 20)
        for n in slice_degrees(shape, devices):
            if n < devices.count:
                yield Choice("fsdp + tensor", f"fsdp + tensor({n})", cls(tensor=n), 31)
        for n in expert_counts(shape, devices):
            yield Choice("fsdp + expert", f"fsdp + expert({n})", cls(expert=n), 32)
        for n in stage_counts(shape, devices):
            if n < devices.count:
                yield Choice("fsdp + pipeline", f"fsdp + pipeline({n})", cls(pipeline=n), 33)
        if devices.gpu:
            name = "fsdp, all in CPU memory"
            yield Choice(name, name, cls(offload="cpu"), 41)

    @classmethod
    def remedies(cls, devices: Devices) -> Iterator[StrategyBase]:
        if devices.count > 1:
            yield cls()
        if devices.gpu:
            yield cls(offload="cpu")


@cache
def _capabilities(everywhere: bool, slices: int, stages: int, experts: int) -> Capabilities:
    name = "fsdp"
    found = replace(
        divided(WHOLE_COPIES, name),
        combines=frozenset({"tensor", "pipeline", "expert"}),
        offload={"params": ("cpu",), "grads": ("cpu",), "optim": ("cpu",)},
        trained_weights="cast_when_gathered",
        gathers_from_all_nodes=everywhere,
    )
    if experts > 1:
        found = routed(found, f"{name} with expert: {experts}")
    if slices > 1:
        found = sliced(found, f"{name} with tensor: {slices}", slices)
    return staged(found, f"{name} with pipeline: {stages}") if stages > 1 else found
