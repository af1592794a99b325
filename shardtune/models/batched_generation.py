"""Batched generation: many prompts, left padding, a KV cache, stop tokens and stop strings.

Greedy answers are those of `transformers.generate`, token by token. What is faster here: rows that
have ended leave the batch, the beginning that all prompts share (few-shot examples, a system
message) is computed once, no key or value is copied twice, and on a GPU a step is a CUDA graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from shardtune.core.model.decoding_context import decode_behind, decoding_context
from shardtune.core.model.greedy import GREEDY_BELOW
from shardtune.core.model.long_rope import longest_short_text
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.core.model.router_logits import without_router_logits
from shardtune.engine.decode_graphs import DecodeGraphs, cuda_recorder
from shardtune.engine.decode_step import DecodeSteps, Flight, why_not_static
from shardtune.models.context_window import fit_prompts, require_decoder
from shardtune.models.kv_cache import attends_to_all, make_cache

SHARED_PREFIX = 32
"""Tokens that prompts must have in common before these are computed by themselves."""

RowsDone = Callable[[int, int, int], None]
"""Told how many rows have ended, of how many, and how many tokens are written so far."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest, unless there is a temperature."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """A row draws by seed and its number, so that its answer doesn't depend on its neighbours."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Stopping:
    """Where an answer ends."""

    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    """The text is cut before the first of them."""


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt."""

    ids: tuple[int, ...]
    """All tokens, a stop token included."""
    text: str
    reason: Literal["stop", "length"]


@dataclass
class _Row:
    """A prompt under way."""

    index: int
    prompt: Sequence[int]
    generator: torch.Generator | None
    context: Sequence[int] = ()
    """Tokens of the prompt that the answer is decoded behind."""
    written: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.written]

    @property
    def cached(self) -> int:
        """Tokens that were read: all but the last one written."""
        return len(self.prompt) + len(self.written) - 1


EndedRows: TypeAlias = Generator[tuple[int, Completion], None, list[_Row]]
"""Hands out rows as they end; returns those that have to be read anew (LongRoPE)."""


@torch.no_grad()
def complete(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    stopping: Stopping,
    sampling: Sampling | None = None,
    batch_size: int = 16,
    device: str = "cpu",
    progress: RowsDone | None = None,
    retries: bool = True,
    graphs: DecodeGraphs | None = None,
) -> list[Completion]:
    """One completion a prompt, in the order of the prompts. The longest prompts come first: what
    doesn't fit shows at once, and a smaller batch is tried then, if it `retries`. It must not where
    a forward pass has collectives: a rank that left one and began another would wait forever.
    `graphs` are those of the device, unless somebody else records steps."""
    require_decoder(unwrap_model(model).config)
    prompts = fit_prompts(model, prompts, stopping.max_new_tokens)
    sampling = sampling or Sampling()
    was_training = model.training
    model.eval()
    try:
        decoder = _Decoder(model, tokenizer, stopping, sampling, device)
        if retries:  # one GPU has the whole model
            decoder.use_slots(graphs or DecodeGraphs(cuda_recorder(torch.device(device))))
        found: dict[int, Completion] = {}
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        tokens = 0
        # With a cache each layer has a place in it, and would be compiled by itself, three times.
        with torch.compiler.set_stance("force_eager"):
            while len(found) < len(order):
                batch = order[len(found) : len(found) + batch_size]
                try:
                    for index, each in decoder.batch({i: prompts[i] for i in batch}):
                        found[index] = each
                        tokens += len(each.ids)
                        if progress:
                            progress(len(found), len(order), tokens)
                except torch.OutOfMemoryError:
                    if len(batch) == 1 or not retries:
                        raise
                    decoder.forget_rows()
                    found = {i: found[i] for i in order if i in found and i not in batch}
                    batch_size = len(batch) // 2
                    torch.cuda.empty_cache()
    finally:
        model.train(was_training)
    return [found[index] for index in range(len(prompts))]


class _Decoder:
    """One model with one way to choose tokens."""

    def __init__(
        self, model: Any, tokenizer: Any, stopping: Stopping, sampling: Sampling, device: str
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._stopping, self._sampling, self._device = stopping, sampling, device
        plain = unwrap_model(model)
        self._config = plain.config
        taken = inspect.signature(plain.forward).parameters
        self._without_router_logits = without_router_logits(plain)
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in taken}
        longest = max((len(each) for each in stopping.stop_strings), default=0)
        self._tail = 4 * longest + 4  # a letter is four tokens at most
        self._slots: DecodeSteps | None = None
        self._longest_short = longest_short_text(self._config)
        pad = tokenizer.pad_token_id
        self._pad = pad if pad is not None else min(stopping.stop_ids, default=0)

    def use_slots(self, graphs: DecodeGraphs) -> None:
        """Decodes by steps of few shapes, where they can be recorded and nothing is drawn."""
        plain = unwrap_model(self._model)
        if self._sampling.greedy and not (graphs.refused or why_not_static(plain)):
            self._slots = DecodeSteps(plain, graphs, self._model)

    def forget_rows(self) -> None:
        """After a batch that has failed."""
        if self._slots is not None:
            self._slots.clear()

    def batch(self, prompts: dict[int, Sequence[int]]) -> Iterator[tuple[int, Completion]]:
        """Completes some prompts together; each is handed out as soon as it has ended."""
        rows = [
            _Row(
                index,
                list(ids) or [self._pad],
                self._generator(index),
                decoding_context(self._tokenizer, ids),
            )
            for index, ids in prompts.items()
        ]
        while rows:
            rows = yield from self._answered(rows)

    def _answered(self, rows: list[_Row]) -> EndedRows:
        """Reads rows, and goes on with them as long as what was read holds."""
        most, outgrown = self._stopping.max_new_tokens, list[_Row]()
        texts = [row.tokens for row in rows]
        room = max(map(len, texts))
        if self._slots is None:
            room += most
        cache = make_cache(self._config, room)
        is_short = self._longest_short is None or max(map(len, texts)) <= self._longest_short
        shared = _shared_prefix(texts) if attends_to_all(cache) and is_short else 0
        if shared:
            first = torch.tensor([texts[0][:shared]], device=self._device)
            self._forward(first, torch.ones_like(first), cache)
            cache.batch_repeat_interleave(len(rows))
        ids, mask = self._left_padded([text[shared:] for text in texts])
        mask = torch.cat([mask.new_ones(len(rows), shared), mask], dim=1)
        while True:
            logits = self._forward(ids, mask, cache)
            new = self._choose(logits, rows)
            alive = []
            for position, (row, token) in enumerate(zip(rows, new.tolist(), strict=True)):
                row.written.append(token)
                ended = self._has_ended(row)
                if ended or len(row.written) == most:
                    yield row.index, self._completion(row, ended)
                elif self._is_outgrown(row):
                    outgrown.append(row)
                else:
                    alive.append(position)
            if not alive:
                break
            if self._slots is not None:
                self._move(self._slots, {place: rows[place] for place in alive}, cache, shared)
                del cache  # or each key would be there twice until all rows have ended
                outgrown += yield from self._in_slots(self._slots, [rows[place] for place in alive])
                break
            if len(alive) < len(rows):
                rows = [rows[position] for position in alive]
                kept = torch.tensor(alive, device=self._device)
                new, mask = new[kept], mask[kept]
                cache.batch_select_indices(kept)
            ids = new[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        return outgrown

    def _is_outgrown(self, row: _Row) -> bool:
        """Whether the next token makes another text of it, so that what was read of it is void."""
        return self._longest_short is not None and row.cached == self._longest_short

    def _move(self, slots: DecodeSteps, begun: dict[int, _Row], cache: Any, shared: int) -> None:
        """Takes rows over from a prefilled cache, each from its place there."""
        longest = max(row.cached for row in begun.values())
        slots.reserve(len(begun), longest + self._stopping.max_new_tokens)
        for place, row in begun.items():
            slots.add(cache, place, row.cached, shared)

    def _in_slots(self, slots: DecodeSteps, rows: list[_Row]) -> EndedRows:
        """Goes on with rows that have a first token and are in their slots."""
        most, outgrown = self._stopping.max_new_tokens, list[_Row]()
        ahead: list[_Row] = []
        while rows:
            if not ahead:
                ahead, flight = list(rows), self._launch(slots, rows)
            for row, token in zip(ahead, flight.tokens(), strict=True):
                row.written.append(token)
            # The GPU computes the next token while the host looks whose last one this was. Who has
            # ended by that is computed once in vain.
            goes_on = any(len(row.written) < most for row in rows)
            ahead = list(rows) if goes_on and not any(map(self._is_outgrown, rows)) else []
            if ahead:
                flight = self._launch(slots, rows)
            for place in reversed(range(len(rows))):
                row, ended = rows[place], self._has_ended(rows[place])
                is_last = ended or len(row.written) == most
                if is_last or self._is_outgrown(row):
                    slots.remove(place)
                    rows[place] = rows[-1]
                    rows.pop()
                if is_last:
                    yield row.index, self._completion(row, ended)
                elif self._is_outgrown(row):
                    outgrown.append(row)
        return outgrown

    def _launch(self, slots: DecodeSteps, rows: Sequence[_Row]) -> Flight:
        return slots.launch([row.written[-1] for row in rows], chosen=True)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """The logits of the next token, in fp32."""
        inputs: dict[str, Any] = {**self._without_router_logits}
        if "position_ids" in self._takes:
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, -ids.shape[1] :]
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = 1
        found = self._model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **inputs
        )
        logits: Tensor = found.logits[:, -1].float()
        return logits

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(prompt) for prompt in prompts)
        ids = [[self._pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)

    def _choose(self, logits: Tensor, rows: Sequence[_Row]) -> Tensor:
        if self._sampling.greedy:
            return logits.argmax(dim=-1)
        odds = nucleus(logits / self._sampling.temperature, self._sampling)
        drawn = [
            torch.multinomial(each.cpu(), 1, generator=row.generator)
            for each, row in zip(odds, rows, strict=True)
        ]
        return torch.cat(drawn).to(self._device)

    def _generator(self, index: int) -> torch.Generator | None:
        if self._sampling.greedy:
            return None
        return torch.Generator().manual_seed((self._sampling.seed << 32) + index)

    def _has_ended(self, row: _Row) -> bool:
        if row.written[-1] in self._stopping.stop_ids:
            return True
        if not self._stopping.stop_strings:
            return False
        context = row.context if len(row.written) <= self._tail else ()
        tail = decode_behind(self._tokenizer, context, row.written[-self._tail :])
        return any(each in tail for each in self._stopping.stop_strings)

    def _completion(self, row: _Row, ended: bool) -> Completion:
        text = decode_behind(self._tokenizer, row.context, row.written)
        cuts = [text.find(each) for each in self._stopping.stop_strings]
        text = text[: min((cut for cut in cuts if cut >= 0), default=len(text))]
        return Completion(tuple(row.written), text, "stop" if ended else "length")


def nucleus(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities of the `top_k` likeliest tokens, of which the fewest that reach `top_p`."""
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    odds = logits.softmax(dim=-1)
    if sampling.top_p >= 1:
        return odds
    high, order = odds.sort(dim=-1, descending=True)
    # The token that crosses the border stays.
    high = high.masked_fill(high.cumsum(dim=-1) - high >= sampling.top_p, 0.0)
    kept = torch.zeros_like(odds).scatter(-1, order, high)
    return kept / kept.sum(dim=-1, keepdim=True)


def _shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, one token of each left over; 0 if too few."""
    if len(prompts) < 2:
        return 0
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    count = min(sum(1 for _ in same), min(map(len, prompts)) - 1)
    return count if count >= SHARED_PREFIX else 0
