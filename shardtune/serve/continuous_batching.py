"""Continuous batching: requests join and leave a running batch between two tokens.

transformers has continuous batching of its own. It has no adapter per request and one seed for all,
so this is ours: a prefill for those who join, then one forward pass a step for all who are there.
Rows with the same adapter make a batch (a lane, `lanes.py`); with several adapters over one base,
lanes take turns. That is slower than one mixed batch, and exact for whatever an adapter changes.

Nothing here knows threads: `step` is called by whoever owns the model.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardtune.core.model.long_rope import longest_short_text
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.core.model.router_logits import without_router_logits
from shardtune.engine.decode_graphs import DecodeGraphs, cuda_recorder
from shardtune.engine.decode_step import DecodeSteps, why_not_static
from shardtune.serve.generation_request import GenerationRequest, choose_tokens, guarded
from shardtune.serve.lanes import EagerLane, Lane, StaticLane
from shardtune.serve.row_cache import can_batch

PREFILL_TOKENS = 4096
"""Prompt tokens that join in one step, at most (one prompt may have more): who waits for the next
token waits for them."""
_log = logging.getLogger("shardtune")


class ContinuousBatch:
    """The requests of one base model and its adapters."""

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 16,
        max_cache_tokens: int = 65_536,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`graphs` are those of the model's GPU, unless somebody else records steps."""
        self._model, self._inner = model, unwrap_model(model)
        model.eval()
        self._config = self._inner.config
        self._device = next(self._inner.parameters()).device
        self.vocabulary: int = self._config.get_text_config().vocab_size
        self._batched = can_batch(self._config)
        self._longest_short = longest_short_text(self._config)
        self.max_rows = max_rows if self._batched else 1
        self.max_cache_tokens = max_cache_tokens
        self._waiting: list[GenerationRequest] = []
        self._lanes: dict[str | None, Lane] = {}
        self._adapter: str | None = None
        taken = inspect.signature(self._inner.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._last_only |= without_router_logits(self._inner)
        self._graphs = graphs or DecodeGraphs(cuda_recorder(self._device))
        if not self._graphs.refused and (why := why_not_static(self._inner)):
            self._graphs = DecodeGraphs(None)
            _log.info("decoding without CUDA graphs: %s", why)
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
        self._take_out_outgrown()
        if joining := self._next():
            guarded(joining, lambda: self._prefill(joining))
        for lane in self._lanes.values():
            if lane.rows:
                guarded(lane.rows, lane.decode)
        self._drop_finished()
        return bool(self._waiting or self.running)

    def _drop_finished(self) -> None:
        self._waiting = [request for request in self._waiting if not request.finished]
        for lane in self._lanes.values():
            lane.drop_finished()

    def _take_out_outgrown(self) -> None:
        """Rows that the next token makes long (LongRoPE) are read anew, before all who wait."""
        if self._longest_short is None:
            return
        for lane in self._lanes.values():
            outgrown = [row for row in lane.rows if len(row.tokens) == self._longest_short + 1]
            for row in outgrown:
                row.outgrown = True
            lane.drop_finished()
            for row in outgrown:
                row.outgrown = False
            self._waiting[:0] = outgrown

    def _next(self) -> list[GenerationRequest]:
        """Who joins: the first that waits, and others with its adapter as far as there is room.
        Of those whose turn it is by now, the ones with prompts like the first one's: what is padded
        is computed in vain."""
        running = [row for lane in self._lanes.values() for row in lane.rows]
        joining: list[GenerationRequest] = []
        ready = self._waiting[: max(self.max_rows - len(running), 0)]
        for request in sorted(ready, key=lambda each: abs(len(each.tokens) - len(ready[0].tokens))):
            together = [*running, *joining, request]
            if joining:
                longest = max(len(each.tokens) for each in (*joining, request))
                if longest * (len(joining) + 1) > PREFILL_TOKENS:
                    break
            widest = max(each.reserved for each in together)
            fits = widest * len(together) <= self.max_cache_tokens
            if (running or joining) and not fits:
                break
            if not joining or request.adapter == joining[0].adapter:
                joining.append(request)
        taken = set(map(id, joining))
        self._waiting = [request for request in self._waiting if id(request) not in taken]
        return joining

    def _prefill(self, joining: list[GenerationRequest]) -> None:
        lane = self._lane(joining[0].adapter)
        longest = max(len(request.tokens) for request in joining)
        ids = torch.zeros(len(joining), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(joining):
            start = longest - len(request.tokens)
            ids[row, start:] = torch.tensor(request.tokens)
            mask[row, start:] = 1
        cache = lane.prefill()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(joining[0].adapter, ids, mask, positions, cache)
        lane.join(joining, cache)
        choose_tokens(joining, logits.argmax(-1).tolist(), lambda row: logits[row])

    def _lane(self, adapter: str | None) -> Lane:
        """That of an adapter. Where steps can't be recorded after all, an empty one is replaced."""
        lane = self._lanes.get(adapter)
        recorded = not self._graphs.refused
        if lane is None or (isinstance(lane, StaticLane) and not recorded and not lane.rows):
            lane = (
                StaticLane(
                    DecodeSteps(self._inner, self._graphs, partial(self._call, adapter)),
                    self._longest_short,
                )
                if recorded
                else EagerLane(self._config, partial(self._forward, adapter), self._batched)
            )
            self._lanes[adapter] = lane
        return lane

    def _forward(
        self, adapter: str | None, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any
    ) -> Tensor:
        """The logits behind the last token of each row."""
        where = {"position_ids": positions.to(self._device)} if self._takes_positions else {}
        answer = self._call(
            adapter,
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            past_key_values=cache,
            use_cache=True,
            **where,
            **self._last_only,
        )
        logits: Tensor = answer.logits[:, -1]
        return logits

    def _call(self, adapter: str | None, **inputs: Any) -> Any:
        """The model's answer with an adapter."""
        if self._model is not self._inner and adapter != self._adapter:
            self._switch(adapter)
        return self._inner(**inputs)

    def _switch(self, adapter: str | None) -> None:
        tuner = self._model.base_model
        if adapter is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            self._model.set_adapter(adapter)
        self._adapter = adapter
