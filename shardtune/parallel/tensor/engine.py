"""Tensor parallelism: every matrix of a layer is sharded over a group of ranks.

`shard_layer.py` says how a layer is sharded. Here a model is built that way, layer by layer, so
that no rank ever holds more than its shards and one whole layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardtune.core.mesh import Mesh
from shardtune.core.model.parallel_plan import require_tensor_parallel
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.tensor_shards import TensorShard
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.parallel.device_mesh import device_mesh, peers
from shardtune.parallel.gradients import add_up, square
from shardtune.parallel.pipeline.stage import Anatomy
from shardtune.parallel.tensor.shard_layer import TensorParallelModel


class TensorEngine(NativeEngine):
    """The native step on sharded layers. Groups of ranks sum their gradients once a step."""

    alone = False

    def __init__(self, builder: ModelBuilder, setup: EngineSetup, world: World, mesh: Mesh) -> None:
        groups = device_mesh(mesh, world)
        model, sharded = build_tensor_parallel(builder, world.device, groups["tensor"])
        super().__init__(model, setup, world, peers(mesh, groups, world), sharded)

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        return self._sharded_state(self.peers.rank, self.peers.size), self._numbers()

    def _reduce_gradients(self) -> None:
        super()._reduce_gradients()
        if self.peers.size > 1:
            add_up(self._gradients().values(), self.peers.group, over=self.peers.size)

    def _norm(self) -> Tensor:
        return norm_of_sharded(self._gradients().values(), self.world)


def build_tensor_parallel(
    builder: ModelBuilder,
    device: str,
    mesh: DeviceMesh,
    then: Callable[[nn.Module], None] = lambda part: None,
) -> tuple[nn.Module, TensorParallelModel]:
    """The model sharded over the ranks of `mesh`; each part goes on to `then` afterwards."""
    seen: list[tuple[Anatomy, TensorParallelModel]] = []

    def look(skeleton: Any) -> tuple[nn.Module, ...]:
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

    model = builder.in_parts(device, divide, look)
    return model, seen[0][1]


def norm_of_sharded(gradients: Any, world: World) -> Tensor:
    """The norm of a gradient that all ranks have together; every rank gets the same."""
    total: Tensor = square(gradients, world.size)
    dist.all_reduce(total)
    return total.sqrt()
