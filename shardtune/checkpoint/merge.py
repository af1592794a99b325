"""Folds an adapter into its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardtune.core.cache import atomic_folder


def merge_adapter(model: Any, tokenizer: Any, target: Path, dtype: torch.dtype) -> float:
    """Writes the merged model to `target`; returns the largest change of a probability.

    `model` is the adapted model in fp32: adding a small correction to 16-bit weights would round
    most of it away before the sum is formed. The sum is rounded once, to `dtype`, at the end.
    """
    before = _probabilities(model)
    merged = model.merge_and_unload().to(dtype)
    after = _probabilities(merged)
    with atomic_folder(target) as partial:
        merged.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return (before - after).abs().max().item()


@torch.no_grad()
def _probabilities(model: Any) -> torch.Tensor:
    ids = torch.arange(64).unsqueeze(0) % model.config.get_text_config().vocab_size
    logits: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits.float().softmax(-1)
