"""Data-parallel peers: the ranks that compute other rows of the same step."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Peers:
    """The ranks that compute other rows of the same step as this one."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """None is every rank."""

    def sum(self, tensor: Tensor) -> None:
        """Adds up over them, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
