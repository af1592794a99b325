"""Chooses the next token of a row: the likeliest one, or one drawn by temperature, top-k, top-p."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardtune.core.model.greedy import GREEDY_BELOW

SORTED_FIRST = 1024
"""Likeliest tokens that top-p looks at; all are sorted only where these don't reach it."""


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token, its log-probability before any temperature, and the likeliest others."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class RequestSampling:
    """How one request chooses its tokens. Each has a generator of its own, so that a seed gives the
    same draws whoever else is in the batch."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens are told with each; None tells no log-probability."""
    _drawn_by: torch.Generator | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    def choose(self, logits: Tensor) -> TokenLogprob:
        """The next token, by the logits (vocabulary,) behind the last one."""
        logits = logits.float()
        token = int(logits.argmax()) if self.greedy else self._draw(logits)
        if self.logprobs is None:
            return TokenLogprob(token)
        logprobs = logits.log_softmax(-1)
        top: tuple[tuple[int, float], ...] = ()
        if self.logprobs:
            values, ids = logprobs.topk(min(self.logprobs, len(logprobs)))
            top = tuple(zip(map(int, ids), map(float, values), strict=True))
        return TokenLogprob(token, float(logprobs[token]), top)

    def _draw(self, logits: Tensor) -> int:
        """In the order of transformers: temperature, top-k, top-p."""
        chances = (logits / self.temperature).softmax(-1)
        generator = self._generator(chances.device)
        if not self.top_k and self.top_p >= 1:
            return int(torch.multinomial(chances, 1, generator=generator))
        kept, order = chances.topk(min(self.top_k or SORTED_FIRST, len(chances)))
        if self.top_k:
            kept = kept / kept.sum()
        elif kept.sum() < self.top_p:
            kept, order = chances.sort(descending=True)
        # A token stays while those before it don't reach top_p. The likeliest always does, though
        # the smallest top_p is 0 in fp32.
        stays = kept.cumsum(-1) - kept < self.top_p
        stays[0] = True
        kept = kept * stays
        return int(order[torch.multinomial(kept, 1, generator=generator)])

    def _generator(self, device: torch.device) -> torch.Generator:
        if self._drawn_by is None:
            generator = torch.Generator(device)
            generator.seed() if self.seed is None else generator.manual_seed(self.seed)
            self._drawn_by = generator
        return self._drawn_by
