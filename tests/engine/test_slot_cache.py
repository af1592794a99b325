"""Slots of the KV cache: buckets, rows that move, and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from shardtune.engine.slot_cache import SlotCache, round_columns, round_rows

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("rows", "rounded"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 12), (17, 24), (64, 64)],
)
def test_rows_are_rounded_up(rows: int, rounded: int) -> None:
    assert round_rows(rows) == rounded


@pytest.mark.parametrize(
    ("columns", "rounded"), [(1, 128), (128, 128), (129, 256), (1025, 1152), (5000, 5120)]
)
def test_columns_are_rounded_up(columns: int, rounded: int) -> None:
    assert round_columns(columns) == rounded


def prefilled(cache: SlotCache, rows: int, columns: int) -> Any:
    """Keys whose numbers say their row (hundreds) and column."""
    made = cache.prefill()
    numbers = 100.0 * torch.arange(rows)[:, None] + torch.arange(columns)
    keys = numbers[:, None, :, None].expand(-1, 2, -1, 4)
    for layer in range(2):
        made.update(keys, -keys, layer)
    return made


def held(cache: SlotCache, row: int) -> list[float]:
    keys, values = cache._layers[1]._all or (None, None)
    assert keys is not None
    assert values is not None
    assert torch.equal(keys, -values)
    return [float(each) for each in keys[row, 0, : cache.lengths[row], 0]]


def test_rows_keep_their_tokens_when_others_come_and_go() -> None:
    cache = SlotCache(LlamaConfig(**SMALL))
    given = prefilled(cache, 3, 5)
    assert cache.reserve(3, 9)
    for row, length in enumerate((2, 5, 3)):
        cache.add(given, row, length)
    assert held(cache, 0) == [3, 4]
    cache.remove(0)
    assert cache.lengths == [3, 5]
    assert held(cache, 0) == [202, 203, 204]
    assert not cache.reserve(2, 100)
    assert cache.reserve(2, 200)  # all move, what is there stays
    assert cache.shape == (2, 256)
    assert held(cache, 0) == [202, 203, 204]
    assert held(cache, 1) == [100, 101, 102, 103, 104]
    assert cache.bucket() == (2, 128)


def test_rows_stay_where_there_is_no_memory_for_more() -> None:
    cache = SlotCache(LlamaConfig(**SMALL))
    cache.reserve(1, 9)
    cache.add(prefilled(cache, 1, 5), 0, 5)
    with pytest.raises(RuntimeError, match="memory"):
        cache.reserve(2, 2**44)
    assert cache.shape == (1, 128)
    assert held(cache, 0) == [0, 1, 2, 3, 4]
    assert cache.reserve(2, 200)  # which there is memory for
    assert cache.shape == (2, 256)
    assert held(cache, 0) == [0, 1, 2, 3, 4]


def test_a_cleared_cache_holds_no_keys() -> None:
    cache = SlotCache(LlamaConfig(**SMALL))
    cache.reserve(4, 200)
    cache.add(prefilled(cache, 1, 5), 0, 5)
    cache.begin_step((1, 128), torch.tensor([[5]]), torch.float32)
    new = torch.ones(1, 2, 1, 4)
    cache.cache.update(new, -new, 1)
    cache.clear()
    for layer in cache._layers:
        assert (layer._all, layer.keys, layer.values) == (None, None, None)
    assert cache.reserve(1, 9)
    assert cache.shape == (1, 128)


def test_padding_behind_a_shared_beginning_is_left_out() -> None:
    cache = SlotCache(LlamaConfig(**SMALL))
    cache.reserve(1, 9)
    cache.add(prefilled(cache, 1, 8), 0, 5, shared=2)
    assert held(cache, 0) == [0, 1, 5, 6, 7]


def test_a_step_writes_behind_each_row_and_sees_no_more() -> None:
    cache = SlotCache(LlamaConfig(**SMALL))
    cache.reserve(2, 9)
    given = prefilled(cache, 2, 5)
    cache.add(given, 0, 2)
    cache.add(given, 1, 5)
    positions = torch.tensor([[2], [5]])
    mask = cache.begin_step((2, 128), positions, torch.float32)
    assert mask.shape == (2, 1, 1, 128)
    assert (mask[:, 0, 0] == 0).sum(-1).tolist() == [3, 6]
    new = torch.tensor([7.0, 8.0])[:, None, None, None].expand(-1, 2, 1, 4)
    keys, _ = cache.cache.update(new, -new, 1)
    assert keys.shape == (2, 2, 128, 4)
    cache.lengths = [3, 6]
    assert held(cache, 0) == [3, 4, 7]
    assert held(cache, 1) == [100, 101, 102, 103, 104, 8]


def test_a_window_hides_what_lies_before_it() -> None:
    cache = SlotCache(MistralConfig(**SMALL, sliding_window=4))
    mask = cache.begin_step((2, 128), torch.tensor([[2], [9]]), torch.float32)
    seen = [row.nonzero().flatten().tolist() for row in mask[:, 0, 0] == 0]
    assert seen == [[0, 1, 2], [6, 7, 8, 9]]
