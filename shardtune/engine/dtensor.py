"""DTensors: what a rank holds of a sharded tensor, and the whole of it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate


def whole(tensor: Tensor) -> Tensor:
    """The undivided tensor. Every rank has to ask for it."""
    if not isinstance(tensor, DTensor):
        return tensor
    # FSDP shards of tensor-parallel ones: first those, then the whole. At once torch would do the
    # same, and warn.
    placements = list(tensor.placements)
    for axis in [axis for axis, at in enumerate(placements) if not at.is_replicate()][:-1]:
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_of(tensor: Tensor) -> int:
    """The bytes that this rank holds of it."""
    mine = local(tensor)
    return mine.numel() * mine.element_size()


def gathered(shard: Tensor, example: Tensor) -> Tensor:
    """The undivided tensor of which this rank holds `shard`, divided as `example` is."""
    if not isinstance(example, DTensor):
        return shard
    divided = DTensor.from_local(
        shard,
        example.device_mesh,
        example.placements,
        run_check=False,
        shape=example.shape,
        stride=example.stride(),
    )
    return whole(divided).to(shard.device)  # from_local takes it to the mesh's device


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """What this rank holds of a weight, as a plain one; an undivided weight is its own shard."""
    return nn.Parameter(local(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def reshard(model: nn.Module) -> None:
    """Lets go of weights that FSDP2 has gathered, so that shards are all that there is.

    A backward pass does so; after a forward pass alone they may stay, and the next one would
    compute with them although their shards have been loaded or updated meanwhile.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
