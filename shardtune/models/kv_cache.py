"""KV cache for batched decoding: keys and values are written into memory that is there already.

transformers' `DynamicCache` copies all of a layer's keys and values for each new token. A
`StaticCache` doesn't, but attends to places that nobody has written yet. Here a layer has room for
the longest answer and hands out a view of what is in use.

A batch here begins and ends together, and a layer may be of any kind that transformers has. Where
rows come and go while others are answered, `serve/row_cache.py` moves them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, with room for `capacity` tokens from the first one on."""

    keys: Any
    values: Any

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._store: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **named: Any) -> Any:
        """Appends new tokens; returns a view of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, held = self.get_seq_length(), (self.keys, self.values)
        end = begin + key_states.shape[-2]
        if self._store is None or self._store[0].shape[-2] < end:
            room = max(end, self._capacity)
            self._store = _room(key_states, room), _room(value_states, room)
            if begin:
                self._store[0][..., :begin, :] = held[0]
                self._store[1][..., :begin, :] = held[1]
        for store, new in zip(self._store, (key_states, value_states), strict=True):
            store[..., begin:end, :] = new
        self.keys, self.values = (store[..., :end, :] for store in self._store)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._store = None  # the next token makes room for the rows that are left

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._store = None


def _room(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty((*like.shape[:-2], tokens, like.shape[-1]))


def make_cache(config: Any, capacity: int) -> DynamicCache:
    """A cache as the model's family needs it. Layers with full attention get room in advance;
    sliding windows, state spaces and others stay what transformers makes them."""
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


def attends_to_all(cache: DynamicCache) -> bool:
    """Whether no layer counts places: then padding may stand between two tokens of a row."""
    return bool(cache.layers) and all(type(layer) is PreallocatedLayer for layer in cache.layers)
