"""LongRoPE by document: each is rotated by the frequencies that it has alone.

LongRoPE (Phi-3 of 128 k, Phi-4-mini) has two sets of frequencies: one for texts no longer than the
model was first trained on, one for longer. transformers takes one of them for all rows at once, by
the largest position among them. A short document would so be rotated otherwise where a long one, or
padding, shares its micro-batch.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.long_rope import longest_short_text
from shardtune.engine.row_lengths import TakesRowLengths


def rotate_by_document(model: nn.Module) -> None:
    """Prepares a model that transformers has just made. Others than those with LongRoPE stay as
    they are, and so do those that are prepared already."""
    for module in model.modules():
        is_ours = isinstance(module, TakesRowLengths)
        if getattr(module, "rope_type", None) == "longrope" and not is_ours:
            _prepare(module)


def _prepare(rotary: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    short = rotary.original_inv_freq
    longest = longest_short_text(rotary.config)
    assert longest is not None
    # The set for one token more; what it scales attention by is the same for both.
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, short.device, seq_len=longest + 1)
    rotary.register_buffer("long_inv_freq", long, persistent=False)
    rotary.longest_short = longest
    kind: type = type(rotary)
    rotary.__class__ = _by_document(kind)


@cache
def _by_document(kind: Any) -> type:
    """A class, not a method of one module: a copy computes with its own buffers."""
    plain = inspect.unwrap(kind.forward)  # without transformers' choice of a set

    class ByDocument(kind, TakesRowLengths):  # type: ignore[misc]
        longest_short: int
        long_inv_freq: Tensor

        @torch.no_grad()
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            lengths = document_lengths(position_ids, self.take_row_lengths())
            is_long = (lengths > self.longest_short)[..., None]
            self.inv_freq = self.long_inv_freq
            long = plain(self, x, position_ids)
            self.inv_freq = self.original_inv_freq
            cos, sin = (
                torch.where(is_long, one, other)
                for one, other in zip(long, plain(self, x, position_ids), strict=True)
            )
            return cos, sin

    ByDocument.__name__ = ByDocument.__qualname__ = kind.__name__
    return ByDocument


def document_lengths(position_ids: Tensor, row_lengths: Tensor | None = None) -> Tensor:
    """For each token how long its document is: the last position in it, and one. Padding counts on
    from the last document, so where there is any, `row_lengths` tells where that ends."""
    width = position_ids.shape[-1]
    places = torch.arange(width, device=position_ids.device)
    ends = torch.ones_like(position_ids, dtype=torch.bool)
    ends[:, :-1] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    last = torch.where(ends, places, width).flip(1).cummin(1).values.flip(1)
    if row_lengths is not None:
        last = torch.minimum(last, (row_lengths[:, None] - 1).clamp(min=0))
    return position_ids.gather(1, last) + 1
