"""FSDP2: every rank keeps a shard of each weight, gradient and optimizer state.

A layer is gathered when it is needed and let go afterwards. The layout says over which axis shards
are formed (`shard`) and over which they are repeated (`replicate`); both come from the mesh. Where
it has a `tensor` axis too, what is sharded is a tensor-parallel shard of each layer.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from shardtune.core.layout import Home, Layout
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.tensor_shards import TensorShard
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.parallel.device_mesh import device_mesh, peers
from shardtune.parallel.fully_shard import sharing
from shardtune.parallel.gradients import ShardedGradients
from shardtune.parallel.tensor.engine import build_tensor_parallel


class FSDPEngine(NativeEngine):
    """The native step on a model whose weights are spread."""

    alone = False
    scales_loss = ShardedGradScaler  # an infinity in one rank's shard is one for all

    def __init__(
        self,
        builder: ModelBuilder,
        setup: EngineSetup,
        world: World,
        layout: Layout,
        mesh: Mesh,
        *,
        reshard_after_forward: bool,
    ) -> None:
        offload = layout.home.get("params", "gpu") == "cpu"
        groups = device_mesh(mesh, world)
        divide = sharing(
            setup, groups, offload=offload, reshard_after_forward=reshard_after_forward
        )
        home = "cpu" if offload else world.device
        sharded = None
        if mesh.size_of("tensor") > 1:  # tensor parallelism first, then FSDP of each shard
            model, sharded = build_tensor_parallel(builder, home, groups["tensor"], divide)
        else:
            model = builder.in_parts(home, divide)
        _prefetch(model)
        self._offload = offload
        gradients = ShardedGradients(TrainedParameters.of(model), sharded, world)
        super().__init__(
            model, setup, world, peers(mesh, groups, world), sharded, gradients=gradients
        )

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        return self.training_state.shards(), self._numbers()

    def _home(self) -> Home:
        return "cpu" if self._offload else "gpu"


def _prefetch(model: nn.Module) -> None:
    """Each layer asks for the next one's weights while it computes."""
    layers = [part for part in model.modules() if isinstance(part, FSDPModule)][1:]
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
