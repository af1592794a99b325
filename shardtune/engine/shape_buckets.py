"""Shape buckets: short micro-batches are padded to few shapes, so that a CUDA graph fits many.

A row's width is rounded up within its power of two, by an eighth of it at most; the positions that
the output head runs at are rounded up to quarters of the width. Where a micro-batch has so many
tokens that a graph gains less, steps are a quarter of these. What is added is never trained:
padding stands behind a row's tokens, and the positions added to the head's have no label in any
row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from shardtune.core.setup import CAPTURED_TOKENS
from shardtune.core.step import IGNORED, MicroBatch

_STEPS = 8  # widths between a power of two and the next
_KEPT = 4  # numbers of the head's positions, as parts of a width
_FINER = 4  # so many times as many of both for more than CAPTURED_TOKENS


@dataclass(frozen=True)
class ShapeBuckets:
    """Pads micro-batches of few enough tokens for a graph; larger ones stay as they are."""

    most_tokens: int
    """Of a micro-batch that is padded."""
    longest: int | None = None
    """Positions that the model knows."""

    def padded(self, batch: MicroBatch) -> MicroBatch:
        """The same rows, wider."""
        rows, width = batch.input_ids.shape
        wider = self._width(width, _fineness(rows * width))
        if wider == width or rows * wider > self.most_tokens or batch.source_mask is not None:
            return batch
        more = (0, wider - width)
        counted = torch.arange(1, 1 + wider - width) + batch.position_ids[:, -1:]
        return replace(
            batch,
            input_ids=functional.pad(batch.input_ids, more, value=int(batch.input_ids[-1, -1])),
            position_ids=torch.cat([batch.position_ids, counted], dim=1),
            targets=functional.pad(batch.targets, more, value=IGNORED),
        )

    def kept(self, kept: Tensor, batch: MicroBatch) -> Tensor:
        """More of the positions at which logits are computed."""
        rows, width = batch.targets.shape
        if rows * width > self.most_tokens or batch.source_mask is not None:
            return kept
        part = max(1, width // (_KEPT * _fineness(rows * width)))
        count = min(-(-len(kept) // part) * part, width)
        others = torch.ones(width, dtype=torch.bool)
        others[kept] = False
        # A position without labels may be among `kept` itself, where there are none at all.
        added = others.nonzero().squeeze(1)[: count - len(kept)]
        return torch.cat([kept, added]).sort().values

    def _width(self, width: int, fineness: int) -> int:
        step = max(8, (1 << (width.bit_length() - 1)) // (_STEPS * fineness))
        wider = -(-width // step) * step
        return wider if self.longest is None else max(width, min(wider, self.longest))


def _fineness(tokens: int) -> int:
    return 1 if tokens <= CAPTURED_TOKENS else _FINER
