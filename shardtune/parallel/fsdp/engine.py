"""FSDP2: every rank keeps a shard of each weight, gradient and optimizer state.

A layer is gathered when it is needed and let go afterwards. The layout says over which axis shards
are formed (`shard`) and over which they are repeated (`replicate`); both come from the mesh. Where
it has a `tensor` axis too, what is sharded is a tensor-parallel shard of each layer; where it has
an `expert` axis, ranks have experts of their own and share all other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from shardtune.core.layout import Home, Layout
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.tensor_shards import TensorShard
from shardtune.core.world import World
from shardtune.engine.dtensor import local
from shardtune.engine.native import NativeEngine
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.parallel.device_mesh import device_mesh, peers
from shardtune.parallel.expert.shard_experts import ExpertParallelModel, build_expert_parallel
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
        model, gradients = _built(builder, home, world, groups, divide)
        _prefetch(model)
        self._offload = offload
        rows = peers(mesh, groups, world)
        super().__init__(model, setup, world, rows, gradients.sharded, gradients=gradients)

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        return self.training_state.shards(), self._numbers()

    def _home(self) -> Home:
        return "cpu" if self._offload else "gpu"


def _built(
    builder: ModelBuilder,
    home: str,
    world: World,
    groups: DeviceMesh,
    divide: Callable[[nn.Module], None],
) -> tuple[nn.Module, ShardedGradients]:
    """The model, of which each rank has its slices or its experts first, and then FSDP's shares of
    them; and its gradients."""
    axes = groups.mesh_dim_names or ()
    if "expert" in axes:
        model, experts = build_expert_parallel(builder, home, groups["expert"], divide)
        return model, SharedExpertGradients(TrainedParameters.of(model), experts, world)
    sliced = None
    if "tensor" in axes:
        model, sliced = build_tensor_parallel(builder, home, groups["tensor"], divide)
    else:
        model = builder.in_parts(home, divide)
    return model, ShardedGradients(TrainedParameters.of(model), sliced, world)


class SharedExpertGradients(ShardedGradients):
    """Gradients of experts in shares. FSDP2 averages them over the ranks that have the same
    experts; their tokens came from all ranks, over which all other gradients are averaged."""

    def __init__(
        self, parameters: TrainedParameters, experts: ExpertParallelModel, world: World
    ) -> None:
        super().__init__(parameters, experts, world)
        self.experts = experts

    def reduce(self) -> None:
        for name, gradient in self.parameters.gradients().items():
            if self.experts.is_routed(name):
                local(gradient).div_(self.experts.mesh.size())


def _prefetch(model: nn.Module) -> None:
    """Each layer asks for the next one's weights while it computes."""
    layers = [part for part in model.modules() if isinstance(part, FSDPModule)][1:]
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
