"""Tensor parallelism: every matrix of a layer in slices, and rows for each group of slices.

`slices.py` says how a layer is cut; here a model is built that way, layer by layer, so that no
rank ever holds more than its slices and one whole layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardtune.core.mesh import Mesh
from shardtune.core.model.parallel_plan import require_slices
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.tensor_shards import Piece
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.parallel.device_mesh import device_mesh, peers
from shardtune.parallel.gradients import add_up, square
from shardtune.parallel.pipeline.stage import Anatomy
from shardtune.parallel.tensor.shard_layer import Slices


class TensorEngine(NativeEngine):
    """The native step on slices. Groups of slices have rows of their own, and meet once a step."""

    alone = False

    def __init__(self, builder: ModelBuilder, setup: EngineSetup, world: World, mesh: Mesh) -> None:
        groups = device_mesh(mesh, world)
        model, slices = build_sliced(builder, world.device, groups["tensor"])
        super().__init__(model, setup, world, peers(mesh, groups, world), slices)

    def pieces(self) -> tuple[list[Piece], dict[str, float]]:
        return self._spread_pieces(self.peers.rank, self.peers.size), self._numbers()

    def _meet(self) -> None:
        super()._meet()
        if self.peers.size > 1:
            add_up(self._gradients().values(), self.peers.group, over=self.peers.size)

    def _norm(self) -> Tensor:
        return norm_of_spread(self._gradients().values(), self.world)


def build_sliced(
    builder: ModelBuilder,
    device: str,
    mesh: DeviceMesh,
    then: Callable[[nn.Module], None] = lambda part: None,
) -> tuple[nn.Module, Slices]:
    """The model in slices over the ranks of `mesh`; each part goes on to `then` once it is cut."""
    seen: list[tuple[Anatomy, Slices]] = []

    def look(skeleton: Any) -> tuple[nn.Module, ...]:
        """Refuses what doesn't divide before anything is read."""
        config = skeleton.config
        family = require_slices(config, mesh.size())
        words = config.get_text_config().vocab_size
        seen.append((Anatomy.of(skeleton), Slices(family, mesh, words)))
        return ()

    def divide(part: nn.Module) -> None:
        anatomy, slices = seen[0]
        if part in anatomy.layers:
            slices.layer(part, first=part is anatomy.layers[0])
        else:
            embedding, *positions = anatomy.embeddings
            slices.ends(
                embedding=embedding,
                positions=positions[0] if positions else None,
                norm=anatomy.norm,
                head=anatomy.head,
            )
        then(part)

    model = builder.in_parts(device, divide, look)
    return model, seen[0][1]


def norm_of_spread(gradients: Any, world: World) -> Tensor:
    """The norm of a gradient that all ranks have together; every rank gets the same."""
    total: Tensor = square(gradients, world.size)
    dist.all_reduce(total)
    return total.sqrt()
