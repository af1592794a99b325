"""Gradients that ranks have computed in parts: their sum, and their norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardtune.core.world import World
from shardtune.engine.dtensor import local
from shardtune.engine.gradient_reduction import GradientReduction
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.engine.unsharded import Unsharded

MESSAGE = 1 << 26
"""Numbers of one message, a quarter of a GiB: enough for any link, little beside the gradients."""


class ShardedGradients(GradientReduction):
    """Gradients of which every rank has shards."""

    def __init__(
        self, parameters: TrainedParameters, sharded: Unsharded | None, world: World
    ) -> None:
        super().__init__(parameters, sharded)
        self.world = world

    def norm(self) -> Tensor:
        """The norm of the gradient that all ranks have together."""
        total = square(self.parameters.gradients().values(), self.world.size)
        dist.all_reduce(total)
        return total.sqrt()


def add_up(
    gradients: Iterable[Tensor],
    group: dist.ProcessGroup | None,
    over: int = 1,
    message: int = MESSAGE,
) -> None:
    """Adds up over the ranks of `group`, in place, in few messages; then divides by `over`.

    A message is a copy. A larger gradient than one is sent as it is.
    """
    waiting: list[Tensor] = []
    for gradient in map(local, gradients):
        if waiting and sum(each.numel() for each in waiting) + gradient.numel() > message:
            _add_up_together(waiting, group, over)
            waiting = []
        waiting.append(gradient)
    if waiting:
        _add_up_together(waiting, group, over)


def _add_up_together(gradients: list[Tensor], group: dist.ProcessGroup | None, over: int) -> None:
    only = gradients[0]
    if len(gradients) == 1 and only.is_contiguous():
        dist.all_reduce(only, group=group)
        only /= over
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= over
    totals = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, totals, strict=True):
        gradient.copy_(total.view_as(gradient))


def square(gradients: Iterable[Tensor], ranks: int) -> Tensor:
    """This rank's part of the squared norm of gradients that are spread over so many ranks.

    A gradient that several of them have alike counts once: each adds its share.
    """
    parts = [local(g).double().square().sum() / (ranks / shard_count(g)) for g in gradients]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def shard_count(tensor: Tensor) -> int:
    """Over how many shards a tensor is divided."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
