"""Rows of a batch's cache, where room for more can't be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardtune.serve.row_cache import LEAST_COLUMNS, RowCache

NOWHERE = 2**44  # columns that no machine has memory for
PROMPTS = ([1, 2, 3], [7, 5])


@pytest.fixture
def model() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prefilled(cache: RowCache, model: Any, prompt: list[int]) -> Any:
    made = cache.prefill()
    model(input_ids=torch.tensor([prompt]), past_key_values=made, use_cache=True)
    return made


def step(cache: RowCache, model: Any, tokens: list[int]) -> Tensor:
    """The logits behind each row's token."""
    mask, positions = cache.begin_step()
    logits: Tensor = model(
        input_ids=torch.tensor(tokens)[:, None], attention_mask=mask, position_ids=positions,
        past_key_values=cache.cache, use_cache=True,
    ).logits[:, -1]  # fmt: skip
    return logits


@torch.no_grad()
def test_rows_go_on_and_grow_where_another_finds_no_room(model: Any) -> None:
    cache = RowCache(model.config)
    for prompt in PROMPTS:
        cache.add(prefilled(cache, model, prompt), 0, len(prompt))
    with pytest.raises(RuntimeError, match="memory"):
        cache.add(prefilled(cache, model, [1]), 0, NOWHERE)
    told = [1 + n % 31 for n in range(LEAST_COLUMNS)]
    for token in told:
        found = step(cache, model, [token, token])
    for row, prompt in enumerate(PROMPTS):
        alone = model(input_ids=torch.tensor([[*prompt, *told]])).logits[0, -1]
        torch.testing.assert_close(found[row], alone)


def test_layers_keep_their_columns_where_one_grows_and_the_next_cannot() -> None:
    """The second layer is so much wider that it alone finds no room for what the first has."""
    config = LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    cache = RowCache(config)
    prefilled = cache.prefill()
    shapes = ((1, 1, 3, 1), (1, 256, 3, 256))
    for layer, shape in zip(prefilled.layers, shapes, strict=True):
        keys = torch.arange(3.0)[:, None].expand(shape)
        layer.update(keys, -keys)
    cache.add(prefilled, 0, 3)
    with pytest.raises(RuntimeError, match="memory"):
        cache.add(prefilled, 0, 2**22)
    mask, positions = cache.begin_step()
    assert (mask.tolist(), positions.tolist()) == ([[1, 1, 1, 1]], [[3]])
    for layer, shape in zip(cache.cache.layers, shapes, strict=True):
        new = torch.full(shape, 9.0)[:, :, :1]
        keys, values = layer.update(new, -new)
        assert torch.equal(keys[0, 0, :, 0], torch.tensor([0.0, 1, 2, 9]))
        assert torch.equal(values, -keys)
