"""Answers to prompts, and the held-out prompts that a run shows before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shardtune.core.host.render_limit import render_limit
from shardtune.core.model.greedy import GREEDY_BELOW
from shardtune.core.model.kind import kind_of
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.core.model.router_logits import without_router_logits

SHORTEST_PROMPT = 4  # where nearly all is trained (plain text), the first quarter is the prompt


@dataclass(frozen=True)
class Prompt:
    """A held-out question as token ids, and the answer that the data gives."""

    ids: tuple[int, ...]
    reference: tuple[int, ...]


def held_out_prompt(input_ids: Sequence[int], trained: Sequence[bool]) -> Prompt:
    """Everything before the first trained token is the question."""
    first = next((index for index, flag in enumerate(trained) if flag), len(input_ids))
    if first < SHORTEST_PROMPT:
        first = max(1, len(input_ids) // 4)
    generate_answers = [
        t for t, flag in zip(input_ids[first:], trained[first:], strict=True) if flag
    ]
    return Prompt(tuple(map(int, input_ids[:first])), tuple(map(int, generate_answers)))


def source_prompt(input_ids: Sequence[int], trained: Sequence[bool]) -> Prompt:
    """Of a pair, the source is the question and the target the answer."""
    border = list(trained).index(True)
    return Prompt(tuple(map(int, input_ids[:border])), tuple(map(int, input_ids[border:])))


def question_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """What a person asked, without the chat template's scaffolding around it."""
    if tokenizer.chat_template is not None:
        mark = "<QUESTION>"  # no template says this by itself
        prefix, _, suffix = _render(tokenizer, mark).partition(mark)
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        if text.startswith(prefix) and text.endswith(suffix):
            return text[len(prefix) : len(text) - len(suffix)].strip()
    plain: str = tokenizer.decode(ids, skip_special_tokens=True)
    return plain.strip()


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    stops: frozenset[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """One answer a prompt, all in one batch; greedy unless a temperature is given. `progress` hears
    after each token how many of at most how many are written."""
    was_training = model.training
    model.eval()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stops, default=0)
    plain = unwrap_model(model)
    paired = kind_of(plain.config) == "encoder_decoder"
    # A decoder goes on where a prompt ends; an encoder counts positions from where it begins.
    ids, mask = _padded(prompts, pad, before=not paired, device=device)
    read = _encoded(model, ids, mask) if paired else {}
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        if temperature >= GREEDY_BELOW
        else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    )
    # With a cache each layer has a place in it, and would be compiled by itself, three times.
    with torch.compiler.set_stance("force_eager"):
        written = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(stops),
            pad_token_id=pad,
            use_cache=True,
            stopping_criteria=[_told(progress, max_new_tokens)] if progress else None,
            **sampling,
            **read,
            **without_router_logits(plain),
        )
    model.train(was_training)
    first = 1 if paired else ids.shape[1]  # behind the token that a decoder starts with
    texts: list[str] = tokenizer.batch_decode(written[:, first:], skip_special_tokens=True)
    return [text.strip() for text in texts]


def _padded(
    prompts: Sequence[Sequence[int]], pad: int, *, before: bool, device: str
) -> tuple[Tensor, Tensor]:
    """The prompts as rows of one length, and a mask of what is a prompt in them."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt) if before else 0
        ids[row, start : start + len(prompt)] = torch.tensor(prompt)
        mask[row, start : start + len(prompt)] = 1
    return ids.to(device), mask.to(device)


def _encoded(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Any]:
    """What the encoder makes of the prompts, for `generate`.

    `generate` would call the encoder by itself. Weights that an engine has spread are gathered when
    the whole model is called, so that is what we do.
    """
    from transformers.modeling_outputs import BaseModelOutput

    first = unwrap_model(model).config.decoder_start_token_id
    start = torch.full_like(ids[:, :1], first)
    answer = model(input_ids=ids, attention_mask=mask, decoder_input_ids=start, use_cache=False)
    read = BaseModelOutput(last_hidden_state=answer.encoder_last_hidden_state)
    return {"encoder_outputs": read, "decoder_start_token_id": first, "num_beams": 1}


def _told(progress: Callable[[int, int], None], most: int) -> Callable[..., Any]:
    """A stopping criterion that stops nothing: transformers asks it after each token."""
    written = count(1)

    def criterion(ids: Any, scores: Any, **_: Any) -> Any:
        progress(next(written), most)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    return criterion


def prompt_ids(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """A question as the model was trained to see it."""
    if not chat:
        return list(tokenizer(text)["input_ids"])
    return list(tokenizer(_render(tokenizer, text), add_special_tokens=False)["input_ids"])


def _render(tokenizer: Any, text: str) -> str:
    question = [{"role": "user", "content": text}]
    with render_limit():
        return str(
            tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        )
