"""Moves small things between CPU memory and a GPU without anybody waiting for them.

Only from and to page-locked memory does a copy run beside the program: from any other the driver
first waits for whatever the GPU has been given before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardtune.core.model.document_boundaries import varlen_inputs
from shardtune.core.step import MicroBatch
from shardtune.engine.loss import kept_positions
from shardtune.engine.shape_buckets import ShapeBuckets


@dataclass(frozen=True, kw_only=True)
class Staged(MicroBatch):
    """A micro-batch on the device, or on its way there."""

    kept: Tensor
    """The positions at which some row has a label."""
    arrived: Any = None
    """The event after which all of it is there."""


class Staging:
    """Sends micro-batches on a stream of their own, beside what the device computes."""

    buckets: ShapeBuckets | None = None
    """Where few shapes are wanted."""

    def __init__(self, device: torch.device, *, told: bool = False) -> None:
        """`told`: the model's attention has to be told where documents begin and end."""
        self._device = device
        self._told = told
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: MicroBatch) -> MicroBatch:
        """Any thread may do so, as early as it likes."""
        if self._stream is None:
            return batch
        torch.cuda.set_device(self._stream.device)  # another thread than ours begins on the first
        with torch.cuda.stream(self._stream):
            try:
                moved = self._moved(batch)
            except torch.OutOfMemoryError:  # it goes with its step, which says what is to be done
                return batch
            return replace(moved, arrived=self._stream.record_event())

    def receive(self, batch: MicroBatch) -> Staged:
        """The batch for use in the current stream. If it is under way, that waits for it, not we;
        if it has not been sent, it goes the straight way."""
        if not isinstance(batch, Staged):
            return self._moved(batch)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(batch.arrived)
        told = (*batch.attention.values(), batch.source_mask, batch.lengths)
        tensors = (each for each in told if isinstance(each, Tensor))
        for tensor in (batch.input_ids, batch.position_ids, batch.targets, batch.kept, *tensors):
            # Else its memory could be given to another batch while this one is computed.
            tensor.record_stream(stream)
        return batch

    def _moved(self, batch: MicroBatch) -> Staged:
        send = partial(sent, device=self._device)
        kept = kept_positions(batch)
        if self.buckets is not None:
            batch = self.buckets.padded(batch)
            kept = self.buckets.kept(kept, batch)
        return Staged(
            input_ids=sent(batch.input_ids, self._device),
            position_ids=sent(batch.position_ids, self._device),
            targets=sent(batch.targets, self._device),
            samples=batch.samples,
            tokens=batch.tokens,
            labels=batch.labels,
            kept=sent(kept, self._device),
            attention=varlen_inputs(batch.position_ids, send) if self._told else {},
            source_mask=None if batch.source_mask is None else send(batch.source_mask),
            lengths=None if batch.lengths is None else send(batch.lengths),
        )


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of CPU memory on the device."""
    if device.type == "cpu":
        return tensor
    locked = torch.empty_like(tensor, pin_memory=True)  # pin_memory() has no fake form: dry runs
    return locked.copy_(tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class Fetched:
    """A few numbers on their way from a device."""

    here: Tensor
    arrived: torch.cuda.Event | None = None

    def wait(self) -> list[float]:
        """The numbers, once they are here."""
        if self.arrived is not None:
            self.arrived.synchronize()  # an event's, so that what was enqueued later may go on
        return list(self.here.tolist())

    def is_here(self) -> bool:
        """Whether they are."""
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]


def fetched(tensor: Tensor) -> Fetched:
    """Begins to fetch a few numbers."""
    if tensor.device.type == "cpu":
        return Fetched(tensor)
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    return Fetched(here, torch.cuda.current_stream(tensor.device).record_event())
