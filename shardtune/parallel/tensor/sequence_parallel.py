"""Sequence parallelism: how hidden states flow between ranks that hold shards of one layer.

Between the blocks of a layer each rank has a run of the tokens, [rows, tokens / ranks, width]; a
block needs all of them, and its ranks' results have to be added up. Every function here is a
collective and its mirror in the backward pass. Where the tokens don't divide, the last rank's run
is filled up with zeros, which no block ever sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


@dataclass
class Flow:
    """The ranks that hold shards of the same layers, and how many tokens a row has just now."""

    group: dist.ProcessGroup
    rank: int
    size: int
    tokens: int = 0

    def gather(self, mine: Tensor) -> Tensor:
        """All tokens, for work that each rank does its part of: gradients are parts of a sum."""
        return _apply(_Gather, mine, self, self.tokens)

    def reduce_scatter(self, part: Tensor) -> Tensor:
        """My tokens of the sum of all ranks' results."""
        return _apply(_ReduceScatter, part, self)

    def scatter(self, whole: Tensor) -> Tensor:
        """My tokens of what every rank has."""
        return _apply(_Scatter, whole, self)

    def all_gather(self, mine: Tensor) -> Tensor:
        """All tokens, for work that every rank does alike: gradients are whole."""
        return _apply(_AllGather, mine, self, self.tokens)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' results, for work that every rank does alike."""
        return _apply(_Sum, part, self)

    # The collectives themselves, without gradients ---------------------------------------------

    def all_gathered(self, mine: Tensor, tokens: int) -> Tensor:
        mine = mine.contiguous()
        runs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(runs, mine, group=self.group)
        whole = torch.cat(runs, 1)
        if whole.shape[1] == tokens:
            return whole
        # No view, not even of one row: FSDP2 warns of layers that return one.
        return whole[:, :tokens].clone(memory_format=torch.contiguous_format)

    def reduce_scattered(self, part: Tensor) -> Tensor:
        runs = self._runs(part)
        mine = torch.empty_like(runs[0])
        dist.reduce_scatter(mine, runs, group=self.group)
        return mine

    def my_tokens(self, whole: Tensor) -> Tensor:
        return self._runs(whole)[self.rank]

    def _runs(self, whole: Tensor) -> list[Tensor]:
        """Each rank's run of the tokens."""
        missing = -whole.shape[1] % self.size
        filled = functional.pad(whole, (0, 0, 0, missing)) if missing else whole
        return [part.contiguous() for part in filled.chunk(self.size, 1)]


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, flow: Flow, tokens: int) -> Tensor:
        ctx.flow = flow
        return flow.all_gathered(mine, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flow.reduce_scattered(gradients[0]), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, flow: Flow) -> Tensor:
        ctx.flow, ctx.tokens = flow, part.shape[1]
        return flow.reduce_scattered(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flow.all_gathered(gradients[0], ctx.tokens), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, flow: Flow) -> Tensor:
        ctx.flow, ctx.tokens = flow, whole.shape[1]
        return flow.my_tokens(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flow.all_gathered(gradients[0], ctx.tokens), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, flow: Flow, tokens: int) -> Tensor:
        ctx.flow = flow
        return flow.all_gathered(mine, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flow.my_tokens(gradients[0]), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, flow: Flow) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=flow.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None
