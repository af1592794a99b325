"""A copy of a rank's shards in CPU memory, so that training can go on while they are written.

The memory is kept for the next copy: getting new memory from the system costs more than copying,
and there is never more than one copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardtune.core.tensor_shards import TensorShard


@dataclass(frozen=True)
class BufferSpec:
    """Where a shard is copied to; it holds no shard itself."""

    key: tuple[object, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, shard: TensorShard) -> BufferSpec:
        tensor = shard.tensor
        shape = tuple(tensor.shape)
        key = (shard.key, shard.region, tensor.dtype, shape)
        return cls(key, shape, tensor.dtype, tensor.device)

    def allocate(self) -> Tensor:
        if self.device.type == "cuda":  # a copy to other memory would make the GPU wait
            with torch.cuda.device(self.device):
                return torch.empty(self.shape, dtype=self.dtype, pin_memory=True)
        return torch.zeros(self.shape, dtype=self.dtype)  # written to, so it is there


class Snapshot:
    """Memory for one copy of the shards."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def take(self, shards: Sequence[TensorShard]) -> list[TensorShard]:
        """The shards, copied; from a GPU the copy may still be under way: see `wait`."""
        places = [BufferSpec.of(shard) for shard in shards]
        self._kept = {place.key: self._buffer(place) for place in places}
        copies = [
            replace(shard, tensor=self._kept[place.key], made=None)
            for shard, place in zip(shards, places, strict=True)
        ]
        if any(shard.tensor.is_cuda for shard in shards):
            self._copy_beside(shards, copies)
        else:
            for shard, copy in zip(shards, copies, strict=True):
                copy.tensor.copy_(shard.value())
        return copies

    def preallocate(self, places: Sequence[BufferSpec]) -> None:
        """Gets memory for shards that are to be copied later. What can't be had now is asked for
        again by `take`, which says so."""
        with contextlib.suppress(RuntimeError):
            for place in places:
                self._kept[place.key] = place.allocate()

    def wait(self) -> None:
        """Returns when the copy is complete. The thread that writes waits here."""
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer(self, place: BufferSpec) -> Tensor:
        kept = self._kept.get(place.key)
        return place.allocate() if kept is None else kept

    def _copy_beside(self, shards: Sequence[TensorShard], copies: Sequence[TensorShard]) -> None:
        """Copies on a stream of its own. The next update waits for it on the GPU; the forward and
        backward passes before it don't change what is copied, and run meanwhile."""
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for shard, copy in zip(shards, copies, strict=True):
                value = shard.value()  # what is made here is let go here, and the next one fits
                copy.tensor.copy_(value, non_blocking=True)
                if value is shard.tensor and value.is_cuda:
                    value.record_stream(self._stream)
            copied = self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)

        def wait(*_: object) -> None:
            torch.cuda.current_stream().wait_event(copied)
            handle.remove()

        handle = register_optimizer_step_pre_hook(wait)
