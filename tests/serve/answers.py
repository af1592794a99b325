"""What transformers itself answers, and what a continuous batch does, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from shardtune.serve.continuous_batching import ContinuousBatch
from shardtune.serve.generation_request import GenerationRequest, Piece
from shardtune.serve.sampling import RequestSampling
from shardtune.serve.text_stream import TextStream


class NoText:
    """A tokenizer for tests of tokens."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(f"<{token}>" for token in ids)


class Answer:
    """Hears the pieces of one request."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def __call__(self, piece: Piece) -> None:
        self.pieces.append(piece)

    @property
    def tokens(self) -> list[int]:
        return [each.token for piece in self.pieces for each in piece.tokens]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish(self) -> str | None:
        return self.pieces[-1].finish if self.pieces else None


def random_prompts(count: int, vocabulary: int, longest: int = 40) -> list[list[int]]:
    draw = random.Random(11)
    sizes = [draw.randint(1, longest) for _ in range(count)]
    return [[draw.randrange(vocabulary) for _ in range(size)] for size in sizes]


def generated(model: Any, prompt: Sequence[int], length: int) -> list[int]:
    """By `transformers.generate`, alone."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        written = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length,
            do_sample=False, eos_token_id=None, pad_token_id=0,
            temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
    return list(map(int, written[0, len(prompt) :]))


def ask(prompt: Sequence[int], length: int, **settings: Any) -> tuple[GenerationRequest, Answer]:
    """A greedy request, and who hears its answer."""
    heard = Answer()
    sampling = settings.pop("sampling", None) or RequestSampling(temperature=0)
    text = settings.pop("text", None) or TextStream(NoText())
    stops = settings.pop("stops", frozenset())
    return GenerationRequest(prompt, length, sampling, stops, text, heard, **settings), heard


def batched(
    batch: ContinuousBatch, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[list[int]]:
    """All of them in one batch, which they leave as they end."""
    answers = []
    for prompt, length in zip(prompts, lengths, strict=True):
        request, heard = ask(prompt, length)
        batch.submit(request)
        answers.append(heard)
    while batch.step():
        pass
    return [answer.tokens for answer in answers]
