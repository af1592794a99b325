"""Attention of one new token a row over a KV cache, without a copy of keys for each query head.

Where several query heads share a key head (grouped-query attention), transformers repeats keys and
values before it calls SDPA with a mask. With one token a row that isn't needed: the heads of a
group stand where SDPA expects the tokens of a query, and see the same keys under the same mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

DECODE_ATTENTION = "shardtune_decode"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What some families ask of attention besides: transformers' own function has that."""


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """In the form that transformers calls; what SDPA would give, up to rounding."""
    rows, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    other = any(asked.get(name) is not None for name in _UNSUPPORTED)
    if tokens > 1 or groups == 1 or attention_mask is None or dropout or other:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **asked
        )
        return found
    together = functional.scaled_dot_product_attention(
        query.reshape(rows, heads // groups, groups, size),
        key,
        value,
        attn_mask=attention_mask.expand(-1, -1, groups, -1),
        scale=scaling,
    )
    return together.reshape(rows, 1, heads, value.shape[-1]), None


@contextmanager
def attending_by_groups(config: Any) -> Iterator[None]:
    """Lets a model that attends by SDPA take `decode_attention` for a while."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(DECODE_ATTENTION, decode_attention)
    before = config._attn_implementation
    config._attn_implementation = DECODE_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
