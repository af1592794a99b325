"""FSDP2 (torch's `fully_shard`) applied to one part of a model: a layer, a stage, the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shardtune.core.peft_wrapper import unwrap_model
from shardtune.core.setup import EngineSetup
from shardtune.engine.forward_pass import COMPUTE


def sharing(
    setup: EngineSetup, groups: DeviceMesh, *, offload: bool, reshard_after_forward: bool
) -> Callable[[nn.Module], None]:
    """Divides a part of a model into shares, over the axes that there are for it."""
    rows = tuple(axis for axis in groups.mesh_dim_names or () if axis in ("replicate", "shard"))
    compute = COMPUTE[setup.precision]
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != torch.float32 else None,
        reduce_dtype=torch.float32,  # sums of many small numbers
        cast_forward_inputs=False,  # autocast decides, as it does without sharding
    )
    pinned = groups.device_type == "cuda"
    keeping = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()

    def divide(part: nn.Module) -> None:
        # peft's wrapper is passed by when a text is generated; the model inside never is.
        fully_shard(
            unwrap_model(part),
            mesh=groups[rows],
            mp_policy=policy,
            offload_policy=keeping,
            reshard_after_forward=reshard_after_forward,
        )

    return divide
