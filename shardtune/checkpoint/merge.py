"""Folds an adapter into its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardtune.core.atomic_write import atomic_folder
from shardtune.errors import Problem, RunError

PROBABILITY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""How far rounding to a type may move a probability."""


def merge_adapter(model: Any, tokenizer: Any, target: Path, dtype: torch.dtype) -> float:
    """Writes the merged model to `target`; returns the largest change of a probability.

    `model` is the adapted model in fp32: adding a small correction to 16-bit weights would round
    most of it away before the sum is formed. The sum is rounded once, to `dtype`, at the end.
    """
    before = _probabilities(model)
    merged = model.merge_and_unload()
    for parameter in merged.parameters():  # not `.to`: it would round the rotary tables too
        parameter.data = parameter.data.to(dtype)
    change = (before - _probabilities(merged)).abs().max().item()
    if not change <= PROBABILITY_TOLERANCE[dtype]:
        fact = f"merged, the model's probabilities change by up to {change:.2g}: not rounding alone"
        fix = "use the adapter as it is, with peft"
        raise RunError(Problem("merge", fact, fix))
    merged.config.dtype = dtype
    with atomic_folder(target) as partial:
        merged.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return change


@torch.no_grad()
def _probabilities(model: Any) -> torch.Tensor:
    ids = torch.arange(64).unsqueeze(0) % model.config.get_text_config().vocab_size
    dtype = next(model.parameters()).dtype
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits.float().softmax(-1)
