"""Continuous batching: requests join and leave a running batch between two tokens.

transformers has continuous batching of its own. It has no adapter per request and one seed for all,
so this is ours: a prefill for those who join, then one forward pass a step for all who are there.
Rows with the same adapter make a batch (a lane); with several adapters over one base, lanes take
turns. That is slower than one mixed batch, and exact for whatever an adapter changes.

Nothing here knows threads: `step` is called by whoever owns the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from shardtune.core.peft_wrapper import unwrap_model
from shardtune.serve.row_cache import RowCache, SingleRowCache, can_batch
from shardtune.serve.sampling import RequestSampling, TokenLogprob
from shardtune.serve.text_stream import TextStream

PREFILL_TOKENS = 4096
"""Prompt tokens that join in one step, at most (one prompt may have more): who waits for the next
token waits for them."""

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Piece:
    """What a step adds to an answer. The last one says why it is the last."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    error: str = ""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt, how to go on with it, and who hears of each piece."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: RequestSampling
    stops: frozenset[int]
    text: TextStream
    hear: Callable[[Piece], None]
    adapter: str | None = None
    """None answers with the base model."""
    written: int = field(default=0, init=False)
    last: int = field(default=0, init=False)
    finished: bool = field(default=False, init=False)

    @property
    def reserved(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt) + self.max_tokens

    def take(self, chosen: TokenLogprob) -> None:
        """Notes a token and tells of it, and of the end if it is the last."""
        self.last, self.written = chosen.token, self.written + 1
        if chosen.token in self.stops:
            return self._end(Piece(self.text.end(), (), "stop"))
        text = self.text.add(chosen.token)
        if self.text.stopped:
            return self._end(Piece(text, (chosen,), "stop"))
        if self.written == self.max_tokens:
            text += self.text.end()
            finish: Finish = "stop" if self.text.stopped else "length"
            return self._end(Piece(text, (chosen,), finish))
        return self.hear(Piece(text, (chosen,)))

    def give_up(self, finish: Finish, error: str = "") -> None:
        """Ends it where it stands."""
        self._end(Piece("", (), finish, error))

    def _end(self, piece: Piece) -> None:
        self.finished = True
        self.hear(piece)


class ContinuousBatch:
    """The requests of one base model and its adapters."""

    def __init__(self, model: Any, *, max_rows: int = 16, max_cache_tokens: int = 65_536) -> None:
        self._model, self._inner = model, unwrap_model(model)
        model.eval()
        self._config = self._inner.config
        self._device = next(self._inner.parameters()).device
        self.vocabulary: int = self._config.get_text_config().vocab_size
        self._batched = can_batch(self._config)
        self.max_rows = max_rows if self._batched else 1
        self.max_cache_tokens = max_cache_tokens
        self._waiting: list[GenerationRequest] = []
        self._lanes: dict[str | None, _Lane] = {}
        self._adapter: str | None = None
        taken = inspect.signature(self._inner.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        if model is not self._inner:
            self._switch(None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(len(lane.rows) for lane in self._lanes.values())

    def submit(self, request: GenerationRequest) -> None:
        self._waiting.append(request)

    def cancel(self, request: GenerationRequest) -> None:
        """Its place is free before the next step."""
        if not request.finished:
            request.give_up("cancelled")

    @torch.inference_mode()
    def step(self) -> bool:
        """One token more for all who run, after those have joined for whom there is room. Returns
        whether anybody is left."""
        self._drop_finished()
        if joining := self._next():
            _guarded(joining, lambda: self._prefill(joining))
        for adapter, lane in self._lanes.items():
            if lane.rows:
                _guarded(lane.rows, partial(self._decode, adapter, lane))
        self._drop_finished()
        return bool(self._waiting or self.running)

    def _drop_finished(self) -> None:
        self._waiting = [request for request in self._waiting if not request.finished]
        for lane in self._lanes.values():
            lane.drop_finished()

    def _next(self) -> list[GenerationRequest]:
        """Who joins: the first that waits, and others with its adapter as far as there is room."""
        running = [row for lane in self._lanes.values() for row in lane.rows]
        joining: list[GenerationRequest] = []
        for request in self._waiting:
            together = [*running, *joining, request]
            if joining:
                longest = max(len(each.prompt) for each in (*joining, request))
                if longest * (len(joining) + 1) > PREFILL_TOKENS:
                    break
            widest = max(each.reserved for each in together)
            fits = widest * len(together) <= self.max_cache_tokens
            if len(together) > self.max_rows or (running and not fits) or (joining and not fits):
                break
            if not joining or request.adapter == joining[0].adapter:
                joining.append(request)
        taken = set(map(id, joining))
        self._waiting = [request for request in self._waiting if id(request) not in taken]
        return joining

    def _prefill(self, joining: list[GenerationRequest]) -> None:
        lane = self._lanes.setdefault(joining[0].adapter, _Lane(self._new_cache()))
        longest = max(len(request.prompt) for request in joining)
        ids = torch.zeros(len(joining), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(joining):
            start = longest - len(request.prompt)
            ids[row, start:] = torch.tensor(request.prompt)
            mask[row, start:] = 1
        cache = lane.cache.prefill()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(joining[0].adapter, ids, mask, positions, cache)
        for row, request in enumerate(joining):
            lane.cache.add(cache, row, len(request.prompt))
            lane.rows.append(request)
        _choose(joining, logits)

    def _decode(self, adapter: str | None, lane: _Lane) -> None:
        mask, positions = lane.cache.begin_step()
        ids = torch.tensor([[request.last] for request in lane.rows])
        _choose(lane.rows, self._forward(adapter, ids, mask, positions, lane.cache.cache))

    def _forward(
        self, adapter: str | None, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any
    ) -> Tensor:
        """The logits behind the last token of each row."""
        if self._model is not self._inner and adapter != self._adapter:
            self._switch(adapter)
        where = {"position_ids": positions.to(self._device)} if self._takes_positions else {}
        answer = self._inner(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            past_key_values=cache,
            use_cache=True,
            **where,
            **self._last_only,
        )
        logits: Tensor = answer.logits[:, -1]
        return logits

    def _switch(self, adapter: str | None) -> None:
        tuner = self._model.base_model
        if adapter is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            self._model.set_adapter(adapter)
        self._adapter = adapter

    def _new_cache(self) -> RowCache | SingleRowCache:
        return RowCache(self._config) if self._batched else SingleRowCache(self._config)


@dataclass
class _Lane:
    """Rows that run with one adapter."""

    cache: RowCache | SingleRowCache
    rows: list[GenerationRequest] = field(default_factory=list)

    def drop_finished(self) -> None:
        for row in reversed(range(len(self.rows))):
            if self.rows[row].finished:
                self.cache.remove(row)
                self.rows[row] = self.rows[-1]
                self.rows.pop()


def _guarded(rows: Sequence[GenerationRequest], work: Callable[[], None]) -> None:
    """Work that fails (no memory for a forward pass, say) ends its own requests, not the server."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  whatever a model's own code may raise
        first = str(error).strip().split("\n")[0]
        for request in rows:
            if not request.finished:
                request.give_up("error", f"{type(error).__name__}: {first}")


def _choose(requests: Sequence[GenerationRequest], logits: Tensor) -> None:
    """The next token of each. Greedy ones are found in one call, without a copy of the logits."""
    likeliest = logits.argmax(-1).tolist()

    def choose(row: int, request: GenerationRequest) -> None:
        how = request.sampling
        plain = how.greedy and how.logprobs is None
        request.take(TokenLogprob(likeliest[row]) if plain else how.choose(logits[row]))

    for row, request in enumerate(requests):
        if not request.finished:
            _guarded([request], partial(choose, row, request))
