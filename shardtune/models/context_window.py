"""The context window of a decoder: how many positions it has, and prompts that fit into them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from shardtune.core.model.kind import kind_of
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.errors import ModelError

_log = logging.getLogger("shardtune")


def require_decoder(config: Any) -> None:
    """Refuses encoder-decoders: they have no context that a text goes on from."""
    if kind_of(config) == "encoder_decoder":
        raise ModelError(
            "batches of prompts and log-likelihoods are for decoders; this model has an encoder",
            fix="shardtune generate answers one prompt with it",
        )


def context_length(model: Any) -> int | None:
    """`max_position_embeddings`; None where the configuration names no limit."""
    config = unwrap_model(model).config.get_text_config()
    found = getattr(config, "max_position_embeddings", None)
    return int(found) if found else None


def fit_prompts(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[Sequence[int]]:
    """Prompts that leave room for `max_new_tokens`: longer ones lose their beginning, as in
    lm-evaluation-harness."""
    longest = context_length(model)
    if longest is None:
        return list(prompts)
    room = longest - max_new_tokens
    if room < 1:
        raise ModelError(
            f"the model has {longest} positions, and {max_new_tokens} new tokens leave none for a "
            "prompt",
            fix=f"set max_new_tokens (--max-new-tokens) well below {longest}",
        )
    if cut := sum(len(each) > room for each in prompts):
        _log.warning(
            "%d of %d prompts are longer than %d tokens (%d positions less %d new tokens): their "
            "beginning is left out", cut, len(prompts), room, longest, max_new_tokens,
        )  # fmt: skip
    return [each[-room:] for each in prompts]


def fit_answer(model: Any, prompt: Sequence[int], max_new_tokens: int) -> int:
    """How many tokens an answer may have, of those that are wanted. ModelError where a prompt
    leaves none, or isn't there."""
    if not prompt:
        raise ModelError(
            "the prompt is empty, and this model's tokenizer begins no text by itself",
            fix="give it a text to go on with",
        )
    longest = context_length(model)
    if longest is None:
        return max_new_tokens
    if len(prompt) >= longest:
        raise ModelError(
            f"the prompt has {len(prompt)} tokens, and the model {longest} positions for it and "
            "its answer",
            fix="shorten the prompt",
        )
    return min(max_new_tokens, longest - len(prompt))
