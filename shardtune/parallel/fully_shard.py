"""FSDP2 (torch's `fully_shard`) applied to one part of a model: a layer, a stage, the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.core.setup import EngineSetup
from shardtune.engine.dtensor import local
from shardtune.engine.forward_pass import COMPUTE
from shardtune.parallel.device_mesh import row_mesh
from shardtune.parallel.expert.shard_experts import expert_modules

CutWeight = Callable[[nn.Parameter], Shard | None]
"""Along which dim a weight is cut into shares; None is the first."""


def sharing(
    setup: EngineSetup, groups: DeviceMesh, *, offload: bool, reshard_after_forward: bool
) -> Callable[[nn.Module], None]:
    """Divides a part of a model into shares, over the axes that there are for it. Where one of them
    divides experts, a rank's experts are shared with those ranks alone that have the same ones."""
    rows = tuple(axis for axis in groups.mesh_dim_names or () if axis in ("replicate", "shard"))
    compute = COMPUTE[setup.precision]
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != torch.float32 else None,
        reduce_dtype=torch.float32,  # sums of many small numbers
        cast_forward_inputs=False,  # autocast decides, as it does without sharding
    )
    pinned = groups.device_type == "cuda"
    keeping = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    routes = "expert" in (groups.mesh_dim_names or ())
    twins = groups[rows]
    everywhere = row_mesh(groups) if routes else twins

    def shard(part: nn.Module, mesh: DeviceMesh, cut: CutWeight | None = None) -> None:
        fully_shard(
            part,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=keeping,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=cut,
        )

    def divide(part: nn.Module) -> None:
        for experts in expert_modules(part) if routes else ():
            if not isinstance(experts, FSDPModule):  # the whole model comes after its layers
                shard(experts, twins, lambda weight: _evenly(weight, twins.size()))
        # peft's wrapper is passed by when a text is generated; the model inside never is.
        shard(unwrap_model(part), everywhere)

    return divide


def _evenly(weight: nn.Parameter, shards: int) -> Shard:
    """Along which dim a rank's experts are cut into equal shards: by whole experts, if that can be.
    `require_divisible` has seen to it that there is one."""
    mine = local(weight)
    return Shard(next(dim for dim, length in enumerate(mine.shape) if length % shards == 0))
