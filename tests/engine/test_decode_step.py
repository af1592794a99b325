"""Steps of rows in slots, where room for more can't be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardtune.engine.decode_graphs import DecodeGraphs, DecodeStep
from shardtune.engine.decode_step import DecodeSteps


@torch.no_grad()
def test_no_graph_outlives_the_tensors_that_it_was_recorded_with() -> None:
    """What moves before memory runs out is gone from where graphs would look for it."""
    replayed: list[int] = []

    def record(step: DecodeStep) -> DecodeStep:
        def replay() -> None:
            replayed.append(1)
            step()

        return replay

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    steps = DecodeSteps(model, DecodeGraphs(record))
    prefilled = steps.cache.prefill()
    model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=prefilled, use_cache=True)
    steps.reserve(1, 20)
    steps.add(prefilled, 0, 3)
    tokens = [4]
    for _ in range(3):
        tokens += steps.launch(tokens[-1:], chosen=False).tokens()
    assert len(replayed) == 2
    with pytest.raises(RuntimeError, match="memory"):
        steps.reserve(2, 2**44)
    tokens += steps.launch(tokens[-1:], chosen=False).tokens()
    assert len(replayed) == 2
    given = torch.tensor([[1, 2, 3, *tokens[:-1]]])
    assert tokens[1:] == model(input_ids=given).logits[0, 3:].argmax(-1).tolist()
