"""Gradients that ranks have computed in parts: their sum, and their norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardtune.engines.tensors import local


def add_up(gradients: Iterable[Tensor], group: dist.ProcessGroup | None, over: int = 1) -> None:
    """Adds up over the ranks of `group`, in place, in one message; then divides by `over`."""
    mine = [local(gradient) for gradient in gradients]
    if mine:
        flat = torch.cat([gradient.flatten() for gradient in mine])
        dist.all_reduce(flat, group=group)
        flat /= over
        totals = torch.split(flat, [gradient.numel() for gradient in mine])
        for gradient, total in zip(mine, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


def square(gradients: Iterable[Tensor], ranks: int) -> Tensor:
    """This rank's part of the squared norm of gradients that are spread over so many ranks.

    A gradient that several of them have alike counts once: each adds its share.
    """
    parts = [local(g).double().square().sum() / (ranks / pieces(g)) for g in gradients]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def pieces(tensor: Tensor) -> int:
    """Into how many pieces a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
