"""Named tensors of which each rank has some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def union(mine: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """What any rank of the group has, on all of them. Every rank has to ask.

    Of a tensor that several have, the first rank's is taken.
    """
    said: list[Any] = [None] * dist.get_world_size(group)
    shapes = {name: (tuple(each.shape), each.dtype) for name, each in mine.items()}
    dist.all_gather_object(said, shapes, group=group)
    device = _device(group)
    found: dict[str, Tensor] = {}
    for owner, theirs in enumerate(said):
        for name, (shape, dtype) in theirs.items():
            if name in found:
                continue
            if owner == dist.get_rank(group):
                found[name] = mine[name].detach().to(device).contiguous()
            else:
                found[name] = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(found[name], group=group, group_src=owner)
    return found


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where a group's messages have to lie."""
    gloo = dist.get_backend(group) == "gloo"
    return torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
