"""Micro-batches of one shape, as stages need them: buffers between ranks are made for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shardtune.core.step import IGNORED, MicroBatch


@dataclass(frozen=True)
class Block:
    """The tensors of one or more micro-batches, one after the other."""

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    seeds: Tensor
    """One for each micro-batch, for dropout. They stay on the CPU, where they are read."""
    lengths: Tensor
    """Tokens of each row, padding not counted."""

    @classmethod
    def of(cls, batch: MicroBatch, seed: int = 0) -> Block:
        rows, width = batch.input_ids.shape
        lengths = torch.full((rows,), width) if batch.lengths is None else batch.lengths
        seeds = torch.tensor([seed])
        return cls(batch.input_ids, batch.position_ids, batch.targets, seeds, lengths)

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        return cls(
            torch.cat([block.input_ids for block in blocks]),
            torch.cat([block.position_ids for block in blocks]),
            torch.cat([block.targets for block in blocks]),
            torch.cat([block.seeds for block in blocks]),
            torch.cat([block.lengths for block in blocks]),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of one of the micro-batches."""
        rows, width = self.input_ids.shape
        return rows // len(self.seeds), width

    def to(self, device: torch.device) -> Block:
        return Block(
            self.input_ids.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.seeds,
            self.lengths.to(device, non_blocking=True),
        )

    def filled(self, rows: int, width: int) -> Block:
        """The same with more rows and positions, none of which is trained.

        Padding goes on counting where its row stops, so that it looks like the end of the last
        document, which nothing before it can see; a row of padding looks like a document.
        """
        wider, more = width - self.input_ids.shape[1], rows - self.input_ids.shape[0]
        counting = torch.arange(1, wider + 1)
        positions = torch.cat([self.position_ids, self.position_ids[:, -1:] + counting], dim=1)
        positions = torch.cat([positions, torch.arange(width).expand(more, width)])
        return Block(
            functional.pad(self.input_ids, (0, wider, 0, more)),
            positions,
            functional.pad(self.targets, (0, wider, 0, more), value=IGNORED),
            self.seeds,
            functional.pad(self.lengths, (0, more)),
        )


def alike(
    microbatches: Sequence[MicroBatch], count: int, seed_of: Callable[[int], int]
) -> list[Block]:
    """So many blocks of the largest shape that occurs; empty ones where there are too few."""
    rows = max(batch.input_ids.shape[0] for batch in microbatches)
    width = max(batch.input_ids.shape[1] for batch in microbatches)
    nothing = torch.zeros(1, 1, dtype=torch.long)
    empty = MicroBatch(nothing, nothing, torch.full((1, 1), IGNORED), (), 0, 0)
    filled = [*microbatches, *[empty] * (count - len(microbatches))]
    return [Block.of(batch, seed_of(n)).filled(rows, width) for n, batch in enumerate(filled)]
