"""Lanes: the rows of a batch that run with one adapter, and how a token more comes to each.

On a GPU a lane's steps have few shapes, so that they can be CUDA graphs, and the next one runs
while the host writes out the tokens of the last. Elsewhere, and for models that can't be decoded
so, a step is one call of the model, over no column too many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardtune.engine.decode_step import DecodeSteps, Flight
from shardtune.serve.generation_request import GenerationRequest, choose_tokens
from shardtune.serve.row_cache import RowCache, SingleRowCache

BatchForward = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""From tokens, attention mask, positions and a cache to the logits behind each row's last token."""


class Lane(Protocol):
    """Rows that run with one adapter."""

    rows: list[GenerationRequest]

    def prefill(self) -> Any:
        """An empty cache for new prompts."""

    def join(self, joining: Sequence[GenerationRequest], prefilled: Any) -> None:
        """New rows, whose prompts are in a prefilled cache with left padding."""

    def decode(self) -> None:
        """One token more for each row."""

    def drop_finished(self) -> None:
        """Frees the places of rows that have ended, or are to be read anew."""


class EagerLane:
    """Each step is a call of the model."""

    def __init__(self, config: Any, forward: BatchForward, batched: bool) -> None:
        self.rows: list[GenerationRequest] = []
        self._cache = RowCache(config) if batched else SingleRowCache(config)
        self._forward = forward

    def prefill(self) -> Any:
        return self._cache.prefill()

    def join(self, joining: Sequence[GenerationRequest], prefilled: Any) -> None:
        for row, request in enumerate(joining):
            self._cache.add(prefilled, row, len(request.tokens))
            self.rows.append(request)

    def decode(self) -> None:
        mask, positions = self._cache.begin_step()
        ids = torch.tensor([[request.last] for request in self.rows])
        logits = self._forward(ids, mask, positions, self._cache.cache)
        choose_tokens(self.rows, logits.argmax(-1).tolist(), lambda row: logits[row])

    def drop_finished(self) -> None:
        _drop_finished(self.rows, self._cache.remove)


class StaticLane:
    """Steps of few shapes. Where all rows take the likeliest token, the next step is launched
    before the last one's tokens are told: who turns out to have ended is computed once in vain."""

    def __init__(self, steps: DecodeSteps, longest_short: int | None = None) -> None:
        """`longest_short` is that of `longest_short_text`."""
        self.rows: list[GenerationRequest] = []
        self._steps, self._longest_short = steps, longest_short
        self._ahead: tuple[list[GenerationRequest], Flight] | None = None

    def prefill(self) -> Any:
        return self._steps.cache.prefill()

    def join(self, joining: Sequence[GenerationRequest], prefilled: Any) -> None:
        together = [*self.rows, *joining]
        self._steps.reserve(len(together), max(request.reserved for request in together))
        for row, request in enumerate(joining):
            self._steps.add(prefilled, row, len(request.tokens))
            self.rows.append(request)

    def decode(self) -> None:
        asked, flight = self._ahead or self._launch()
        self._ahead = None
        tokens = flight.tokens()
        if all(request.takes_likeliest for request in self.rows):
            for request, token in zip(asked, tokens, strict=True):
                request.last = token
            goes_on = (request.written + 1 < request.max_tokens for request in self.rows)
            outgrown = (len(request.tokens) == self._longest_short for request in self.rows)
            self._ahead = self._launch() if any(goes_on) and not any(outgrown) else None
        choose_tokens(asked, tokens, lambda row: self._steps.logits[row])

    def drop_finished(self) -> None:
        _drop_finished(self.rows, self._steps.remove)
        if not self.rows:
            self._ahead = None

    def _launch(self) -> tuple[list[GenerationRequest], Flight]:
        chosen = all(request.takes_likeliest for request in self.rows)
        flight = self._steps.launch([request.last for request in self.rows], chosen=chosen)
        return list(self.rows), flight


def _drop_finished(rows: list[GenerationRequest], remove: Callable[[int], None]) -> None:
    """The last row takes the place of one that has ended or is read anew, here and in the cache."""
    for row in reversed(range(len(rows))):
        if rows[row].finished or rows[row].outgrown:
            remove(row)
            rows[row] = rows[-1]
            rows.pop()
