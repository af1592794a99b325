"""Log-likelihood of given continuations: how probable a model finds a text after another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.errors import ModelError
from shardtune.models.context_window import context_length, require_decoder


@dataclass(frozen=True)
class Score:
    """Of one continuation."""

    log_likelihood: float
    """The sum over its tokens."""
    tokens: int
    greedy: bool
    """Whether each of its tokens was the likeliest one."""


@torch.no_grad()
def score_continuations(
    model: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 16,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """One score a pair of context and continuation, in their order. Contexts must not be empty;
    one that doesn't fit into the model's positions loses its beginning."""
    require_decoder(unwrap_model(model).config)
    pairs = _fit(model, pairs)
    was_training = model.training
    model.eval()
    found: dict[int, Score] = {}
    order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
    with torch.compiler.set_stance("force_eager"):
        for begin in range(0, len(order), batch_size):
            batch = order[begin : begin + batch_size]
            scores = _score_batch(model, [pairs[index] for index in batch], device)
            found.update(zip(batch, scores, strict=True))
            if progress:
                progress(len(found), len(order))
    model.train(was_training)
    return [found[index] for index in range(len(pairs))]


def _fit(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    longest = context_length(model)
    if longest is None:
        return list(pairs)
    found = []
    for context, continuation in pairs:
        room = longest + 1 - len(continuation)  # the last token is only predicted
        if room < 1:
            raise ModelError(
                f"a continuation has {len(continuation)} tokens, the model {longest} positions",
                fix="shorten the options of the task",
            )
        found.append((context[-room:], continuation))
    return found


def _score_batch(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], device: str
) -> list[Score]:
    """Left padding: all continuations end in the last column, so only few logits are needed."""
    rows = [[*context, *continuation][:-1] for context, continuation in pairs]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor(
        [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device
    )
    taken = inspect.signature(unwrap_model(model).forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if "position_ids" in taken:
        inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    kept = max(len(continuation) for _, continuation in pairs)
    if "logits_to_keep" in taken:
        inputs["logits_to_keep"] = kept
    logits = model(**inputs).logits[:, -kept:].float().log_softmax(dim=-1)
    scores = []
    for each, (_, continuation) in zip(logits, pairs, strict=True):
        own = each[kept - len(continuation) :]
        said = torch.tensor(list(continuation), device=own.device)
        greedy = bool((own.argmax(dim=-1) == said).all())
        total = float(own.gather(-1, said[:, None]).double().sum())
        scores.append(Score(total, len(continuation), greedy))
    return scores


def split_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of both. They are encoded together, as the model would read them, and spaces at the
    end of the context belong to the continuation: tokenizers put them there."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    first = list(tokenizer(context)["input_ids"])
    whole = list(tokenizer(context + continuation)["input_ids"])
    if not first:
        start = tokenizer.bos_token_id
        first = [tokenizer.eos_token_id if start is None else start]
        return first, whole
    return first, whole[len(first) :]
