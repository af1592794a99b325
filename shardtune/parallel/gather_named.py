"""Named tensors of which each rank has some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def union(mine: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """What any rank of the group has, on all of them. Every rank has to ask."""
    return dict(in_turn(mine, group, lambda _, tensor: tensor))


def in_turn(
    mine: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    made_whole: Callable[[str, Tensor], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """The same, one after another: no rank holds more than one tensor that isn't its own.

    `made_whole` is asked for each of `mine`, also where another rank's is taken: of a tensor that
    several have, that of the first.
    """
    said: list[Any] = [None] * dist.get_world_size(group)
    shapes = {name: (tuple(each.shape), each.dtype) for name, each in mine.items()}
    dist.all_gather_object(said, shapes, group=group)
    device, seen = _device(group), set[str]()
    for owner, theirs in enumerate(said):
        for name, (shape, dtype) in theirs.items():
            if owner == dist.get_rank(group):
                tensor = made_whole(name, mine[name]).detach().to(device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            if name not in seen:
                seen.add(name)
                dist.broadcast(tensor, group=group, group_src=owner)
                yield name, tensor


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where a group's messages have to lie."""
    gloo = dist.get_backend(group) == "gloo"
    return torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
