"""Tensor parallelism: every matrix of a layer is sharded over a group of ranks.

`shard_layer.py` says how a layer is sharded. Here a model is built that way, layer by layer, so
that no rank ever holds more than its shards and one whole layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardtune.core.mesh import Mesh
from shardtune.core.model.parallel_plan import require_tensor_parallel
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.tensor_shards import TensorShard
from shardtune.core.world import World
from shardtune.engine.data_peers import Peers
from shardtune.engine.native import NativeEngine
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.engine.unsharded import Unsharded
from shardtune.parallel.device_mesh import device_mesh, peers
from shardtune.parallel.gradients import ShardedGradients, add_up
from shardtune.parallel.pipeline.stage import Anatomy
from shardtune.parallel.tensor.shard_layer import TensorParallelModel


class TensorEngine(NativeEngine):
    """The native step on sharded layers. Groups of ranks sum their gradients once a step."""

    alone = False

    def __init__(self, builder: ModelBuilder, setup: EngineSetup, world: World, mesh: Mesh) -> None:
        groups = device_mesh(mesh, world)
        model, sharded = build_tensor_parallel(builder, world.device, groups["tensor"])
        rows = peers(mesh, groups, world)
        gradients = TensorGradients(TrainedParameters.of(model), sharded, world, rows)
        super().__init__(model, setup, world, rows, sharded, gradients=gradients)

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        return self.training_state.shards(self.peers.rank, self.peers.size), self._numbers()


class TensorGradients(ShardedGradients):
    """Gradients of sharded layers, which every group of ranks computes of its own rows."""

    def __init__(
        self, parameters: TrainedParameters, sharded: Unsharded, world: World, peers: Peers
    ) -> None:
        super().__init__(parameters, sharded, world)
        self.peers = peers

    def reduce(self) -> None:
        super().reduce()
        if self.peers.size > 1:
            add_up(self.parameters.gradients().values(), self.peers.group, over=self.peers.size)


def build_tensor_parallel(
    builder: ModelBuilder,
    device: str,
    mesh: DeviceMesh,
    then: Callable[[nn.Module], None] = lambda part: None,
) -> tuple[nn.Module, TensorParallelModel]:
    """The model sharded over the ranks of `mesh`; each part goes on to `then` afterwards."""
    seen: list[tuple[Anatomy, TensorParallelModel]] = []

    def inspect(skeleton: Any) -> tuple[nn.Module, ...]:
        """Refuses what doesn't divide before anything is read."""
        config = skeleton.config
        family = require_tensor_parallel(config, mesh.size())
        words = config.get_text_config().vocab_size
        seen.append((Anatomy.of(skeleton), TensorParallelModel(family, mesh, words)))
        return ()

    def divide(part: nn.Module) -> None:
        anatomy, sharded = seen[0]
        if part in anatomy.layers:
            sharded.shard_layer(part, first=part is anatomy.layers[0])
        else:
            embedding, *positions = anatomy.embeddings
            sharded.shard_ends(
                embedding=embedding,
                positions=positions[0] if positions else None,
                norm=anatomy.norm,
                head=anatomy.head,
            )
        then(part)

    model = builder.in_parts(device, divide, inspect)
    return model, seen[0][1]
