"""Vocabulary parallelism: embedding, logits and loss where each rank has a run of the words.

Runs are as torch chunks them: the last may be shorter, because vocabularies rarely divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtune.core.step import IGNORED
from shardtune.parallel.tensor.sequence_parallel import Flow


@dataclass(frozen=True)
class VocabShard:
    """The words of one rank, and the ranks that have the others."""

    flow: Flow
    words: int
    """Of the whole vocabulary."""

    @property
    def longest(self) -> int:
        return -(-self.words // self.flow.size)

    @property
    def first(self) -> int:
        return self.flow.rank * self.longest

    @property
    def size(self) -> int:
        return max(0, min(self.longest, self.words - self.first))

    def mine(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of `ids` in my run, and which of them are there; the others point anywhere."""
        moved = ids - self.first
        inside = (moved >= 0) & (moved < self.size)
        return moved.where(inside, 0), inside


def shard_embedding(embedding: nn.Embedding, vocab: VocabShard) -> None:
    """Each rank looks up its own words; the sum is everybody's. The weight is sharded already."""
    asked: list[Tensor] = []
    padding = embedding.padding_idx
    if padding is not None:  # its row gets no gradient
        here = vocab.first <= padding < vocab.first + vocab.size
        embedding.padding_idx = padding - vocab.first if here else None

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        ids, inside = vocab.mine(args[0])
        asked.append(inside)
        return ids

    def after(module: nn.Module, args: tuple[Tensor, ...], found: Tensor) -> Tensor:
        return vocab.flow.sum(found * asked.pop().unsqueeze(-1))

    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)


def gather_logits_in_eval(head: nn.Module, vocab: VocabShard) -> None:
    """Whoever evaluates or generates sees whole logits; training has a use for the runs."""

    def after(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        return logits if module.training else _gathered(logits, vocab)

    head.register_forward_hook(after)


def _gathered(logits: Tensor, vocab: VocabShard) -> Tensor:
    filled = nn.functional.pad(logits, (0, vocab.longest - vocab.size)).contiguous()
    parts = [torch.empty_like(filled) for _ in range(vocab.flow.size)]
    dist.all_gather(parts, filled, group=vocab.flow.group)
    return torch.cat(parts, -1)[..., : vocab.words]


def vocab_parallel_loss_sum(logits: Tensor, targets: Tensor, vocab: VocabShard) -> Tensor:
    """Cross-entropy summed over label tokens, in fp32; each rank has the logits of its vocab."""
    loss: Tensor = _VocabParallelLoss.apply(logits, targets, vocab)  # type: ignore[no-untyped-call]
    return loss


class _VocabParallelLoss(torch.autograd.Function):
    """Ranks agree on each token's largest logit, then add up what its loss is made of.

    Every rank has the same loss then, and computes the gradient of its own logits alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab: VocabShard) -> Tensor:
        group = vocab.flow.group
        scores = logits.float()
        most = scores.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        scores = scores - most.unsqueeze(-1)
        index, inside = vocab.mine(targets)
        picked = scores.gather(-1, index.unsqueeze(-1)).squeeze(-1) * inside
        powers = scores.exp_()
        sums = torch.stack([powers.sum(-1), picked])
        dist.all_reduce(sums, group=group)
        total, wanted = sums
        counted = targets != IGNORED
        ctx.save_for_backward(powers.div_(total.unsqueeze(-1)), index, inside, counted)
        ctx.dtype = logits.dtype
        losses: Tensor = (total.log() - wanted) * counted
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shares, index, inside, counted = ctx.saved_tensors
        found = shares.scatter_add(-1, index.unsqueeze(-1), -inside.unsqueeze(-1).to(shares.dtype))
        found *= (counted * gradients[0]).unsqueeze(-1)
        return found.to(ctx.dtype), None, None
