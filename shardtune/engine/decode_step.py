"""Decoding of rows in slots: one token more for each, chosen where the logits are.

A step takes the tokens that the step before has chosen, at positions that it counts itself, so that
nothing goes from the host to the GPU between two tokens; the new tokens come back in one copy.
`launch` doesn't wait for them, a `Flight` does: in between, the host has time for what the last
tokens mean. Rows may be added and removed between a launch and its tokens: the GPU does it after
the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardtune.core.model.document_boundaries import VARLEN_SINKS, takes_boundaries
from shardtune.core.model.router_logits import without_router_logits
from shardtune.engine.decode_graphs import Bucket, DecodeGraphs
from shardtune.engine.slot_cache import SlotCache, why_no_slots
from shardtune.kernels.decode_attention import attending_by_groups

_IDS, _POSITIONS, _ACTIVE = range(3)
_NOT_SDPA = ("eager", VARLEN_SINKS)
"""Attention that a family computes itself, with what SDPA doesn't know: sinks, say."""


def why_not_static(model: Any) -> str:
    """Why a model's tokens can't be decoded by steps of few shapes; nothing if they can."""
    taken = inspect.signature(model.forward).parameters
    if not {"position_ids", "logits_to_keep"} <= taken.keys():
        return "its forward pass counts positions itself"
    attention = model.config.get_text_config()._attn_implementation
    if attention not in ("sdpa", "eager") and not takes_boundaries(model):
        return f"attention is {attention}"
    return why_no_slots(model)


@dataclass(frozen=True)
class Flight:
    """A step under way."""

    _host: Tensor
    _arrived: torch.cuda.Event | None

    def tokens(self) -> list[int]:
        """The likeliest token of each row; waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(map(int, self._host.tolist()))


class DecodeSteps:
    """The rows of one batch, all with the same weights."""

    def __init__(
        self, model: Any, graphs: DecodeGraphs, forward: Callable[..., Any] | None = None
    ) -> None:
        """`forward` is called in place of the model where something has to be done around it."""
        self._graphs, self._forward = graphs, forward or model
        self._last_only = {"logits_to_keep": 1, **without_router_logits(model)}
        self._config, self._dtype = model.config.get_text_config(), model.dtype
        self._device: torch.device = next(model.parameters()).device
        self._cuda = self._device.type == "cuda"
        self.cache = SlotCache(model.config)
        self._inputs = torch.empty(3, 0, dtype=torch.long)
        """Tokens, positions, and 1 for rows that somebody has; a column for each row."""
        self._logits: Tensor | None = None
        self._host = torch.empty(0, dtype=torch.long)
        self._launched = 0
        self._arrived: torch.cuda.Event | None = None
        if self._cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._current = False
        self._owner = object()  # of its graphs

    @property
    def logits(self) -> Tensor:
        """Those of the last step, a row each."""
        assert self._logits is not None
        return self._logits[: self._launched]

    def reserve(self, rows: int, columns: int) -> None:
        """Room for so many rows of so many tokens."""
        if self.cache.has_room(rows, columns):
            return
        # First: where memory runs out, some tensors have moved, and graphs would use the old ones.
        self._graphs.forget(self._owner)
        self.cache.reserve(rows, columns)
        rows = self.cache.shape[0]
        self._inputs = torch.zeros(3, rows, dtype=torch.long, device=self._device)
        self._host = torch.zeros(rows, dtype=torch.long, pin_memory=self._cuda)
        self._logits = None
        self._current = False

    def add(self, prefilled: Any, row: int, length: int, shared: int = 0) -> None:
        """A new last row, as in `SlotCache.add`."""
        self.cache.add(prefilled, row, length, shared)
        self._current = False

    def remove(self, row: int) -> None:
        """Forgets a row; the last one takes its place."""
        self.cache.remove(row)
        self._current = False

    def clear(self) -> None:
        """Forgets all rows, and gives their memory back."""
        self._graphs.forget(self._owner)
        self.cache.clear()
        self._logits = None
        self._current = False

    def launch(self, last: Sequence[int], *, chosen: bool) -> Flight:
        """Starts a step behind the `last` token of each row. `chosen`: all of them are what the
        step before found likeliest. Its tokens have to be read before the next one starts."""
        if not (chosen and self._current):
            self._send(last)
        self._graphs.run(self._owner, self.cache.bucket(), self._run)
        rows = self._launched = len(self.cache.lengths)
        self.cache.lengths = [length + 1 for length in self.cache.lengths]
        self._current = True
        host = self._host[:rows]
        host.copy_(self._inputs[_IDS, :rows], non_blocking=self._cuda)
        if self._arrived is not None:
            self._arrived.record()
        return Flight(host, self._arrived)

    def _send(self, last: Sequence[int]) -> None:
        free = self._inputs.shape[1] - len(last)
        rows = ([*last], [*self.cache.lengths], [1] * len(last))
        sent = torch.tensor([[*row, *[0] * free] for row in rows])
        self._inputs.copy_(sent.pin_memory() if self._cuda else sent, non_blocking=self._cuda)

    def _run(self, bucket: Bucket) -> None:
        """The step itself: from `_inputs` to `_inputs` and `_logits`."""
        here = self._inputs[:, : bucket[0]]
        ids, positions = here[_IDS, :, None], here[_POSITIONS, :, None]
        grouped = self._config._attn_implementation not in _NOT_SDPA
        with attending_by_groups(self._config) if grouped else nullcontext():
            answer = self._forward(
                input_ids=ids,
                attention_mask=self.cache.begin_step(bucket, positions, self._dtype),
                position_ids=positions,
                past_key_values=self.cache.cache,
                use_cache=True,
                **self._last_only,
            )
        logits = answer.logits[:, -1]
        if self._logits is None:
            self._logits = logits.new_empty(self._inputs.shape[1], logits.shape[-1])
        self._logits[: bucket[0]].copy_(logits)
        here[_IDS].copy_(logits.argmax(-1))
        here[_POSITIONS].add_(here[_ACTIVE])
