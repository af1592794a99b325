"""FSDP2: every rank keeps a share of each weight, gradient and optimizer state.

A layer is gathered when it is needed and let go afterwards. The layout says over which axis shares
are formed (`shard`) and over which they are repeated (`replicate`); both come from the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shardtune.core.blueprint import Blueprint
from shardtune.core.layout import Home, Layout
from shardtune.core.mesh import Mesh
from shardtune.core.pieces import Piece
from shardtune.core.setup import EngineSetup
from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.engines.native import COMPUTE, NativeEngine
from shardtune.engines.shares import divided_pieces


class FSDPEngine(NativeEngine):
    """The native step on a model whose weights are spread."""

    def __init__(
        self,
        blueprint: Blueprint,
        setup: EngineSetup,
        world: World,
        layout: Layout,
        mesh: Mesh,
        *,
        reshard_after_forward: bool,
    ) -> None:
        device = torch.device(world.device)
        offload = layout.home.get("params", "gpu") == "cpu"
        axes = [(name, size) for name, size in mesh.axes if name in ("replicate", "shard")]
        device_mesh = init_device_mesh(
            device.type,
            tuple(size for _, size in axes),
            mesh_dim_names=tuple(name for name, _ in axes),
        )
        compute = COMPUTE[setup.precision]
        policy = MixedPrecisionPolicy(
            param_dtype=compute if compute != torch.float32 else None,
            reduce_dtype=torch.float32,  # sums of many small numbers
            cast_forward_inputs=False,  # autocast decides, as it does without sharding
        )
        keeping: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
        )

        def divide(part: nn.Module) -> None:
            # peft's wrapper is passed by when a text is generated; the model inside never is.
            inner = getattr(part, "get_base_model", None)
            fully_shard(
                inner() if inner else part,
                mesh=device_mesh,
                mp_policy=policy,
                offload_policy=keeping,
                reshard_after_forward=reshard_after_forward,
            )

        model = blueprint.in_parts("cpu" if offload else world.device, divide)
        _prefetch(model)
        self._offload = offload
        super().__init__(model, setup, world)

    def pieces(self) -> tuple[list[Piece], dict[str, float]]:
        moments = {name: self._moments(name) for name in self.trained}
        return divided_pieces(self.trained, moments), self._numbers()

    def _overflowing(self, microbatches: Sequence[MicroBatch]) -> list[bool]:
        return [False] * len(microbatches)  # no rank can compute by itself

    def _home(self) -> Home:
        return "cpu" if self._offload else "gpu"


def _prefetch(model: nn.Module) -> None:
    """Each layer asks for the next one's weights while it computes."""
    layers = [part for part in model.modules() if isinstance(part, FSDPModule)][1:]
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
