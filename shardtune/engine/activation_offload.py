"""Activations that wait for the backward pass in CPU memory.

What the forward pass of a micro-batch saves is copied out beside the computation and comes back
one layer ahead of need. Nothing makes the host wait: streams wait for each other. The GPU's copy is
held by a reference until its way out is over, never by `record_stream`, so that what is on the GPU
at a time is the same in every step: about one layer on its way and one layer at work.

A whole storage is copied, and once, however many views of it are saved: a view comes back with the
strides it had, which compiled backward graphs rely on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardtune.core.model.peft_wrapper import unwrap_model

SMALLEST_OFFLOADED = 1 << 20
"""Bytes of a storage that is worth the way."""
UNTOLD = 1 << 30
"""Bytes on their way at a time until a pass has shown what a layer saves."""
SLAB = 1 << 30
"""Bytes of pinned memory asked for at a time: torch rounds up to powers of two."""
ALIGNED = 512


class Offload:
    """Around the forward passes of one model: `saving` in each, `done` after its backward pass."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        # Frozen weights are saved for the backward pass too, but are there anyway.
        own = (each.untyped_storage() for each in chain(model.parameters(), model.buffers()))
        self._own = [StorageWeakRef(each) for each in own]  # type: ignore[no-untyped-call]
        self._weights = frozenset(each.cdata for each in self._own)
        self._layers = _layers(model)
        self._pool = _Pool(pinned=device.type == "cuda")
        self._copies = _OverlappedCopies(device) if device.type == "cuda" else _InlineCopies()
        self._pass: _Pass | None = None
        self._last = 0
        """Bytes that the last pass saved."""
        self._most = 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, what autograd saves leaves the device."""
        self.done()
        layer = self._most // self._layers or UNTOLD
        # What the last layer saves is the first to be wanted back: where a pass has shown how much
        # is to come, it stays. No more than that stays if this pass turns out to be a longer one.
        stays = self._last // self._layers
        begin = self._last - stays if stays else None
        found = _Pass(self._device, self._weights, self._copies, self._pool, layer, begin, stays)
        self._pass = found
        # Not to be traced themselves where a compiled layer breaks off and goes on by itself.
        hooks = torch.compiler.disable(found.pack), torch.compiler.disable(found.unpack)  # type: ignore[no-untyped-call]
        with saved_tensors_hooks(*hooks):
            yield
        self._last = found.seen
        self._most = max(self._most, found.seen)

    def done(self) -> None:
        """Lets go of what the backward pass hasn't asked for; buffers are free for the next one."""
        if self._pass is not None:
            self._copies.wait_for_all()
            self._pass.close()
            self._pass = None
            self._pool.reset()


@dataclass(eq=False)
class _Kept:
    """A storage that was saved."""

    index: int
    start: int
    """Bytes that were saved before it."""
    host: Tensor
    here: Tensor | None
    """Its bytes on the device, while they are there."""
    storage: StorageWeakRef
    """As long as this lives no other storage can have its address."""
    copied: Any
    arrived: Any = None
    uses: int = 0


@dataclass(frozen=True)
class _Packed:
    """A view of it, as autograd keeps it."""

    kept: _Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Pass:
    """One micro-batch, forward and backward."""

    def __init__(
        self,
        device: torch.device,
        weights: frozenset[int],
        copies: _InlineCopies,
        pool: _Pool,
        layer: int,
        begin: int | None,
        stays: int,
    ) -> None:
        """`layer` bytes may be on their way at a time, out or back. From `begin` on, where it is
        known, `stays` bytes are left where they are."""
        self._device = device
        self._weights = weights
        self._copies = copies
        self._pool = pool
        self._layer = layer
        self._begin = begin
        self._stays = stays
        self._known: dict[tuple[int, int], _Kept] = {}
        self._staying: dict[tuple[int, int], StorageWeakRef] = {}
        self._kept: list[_Kept] = []
        self._leaving: deque[_Kept] = deque()
        self._under_way = 0
        self._asked: int | None = None
        """The lowest index of what is on the device or has been asked back."""
        self._open = True
        self.seen = 0
        """Bytes that were worth the way."""

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        if not self._moves(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        # In place changes give a storage another version, and its saved view other contents.
        key = storage.cdata, tensor._version
        if key in self._staying:
            return tensor
        kept = self._known.get(key)
        if kept is None:
            size = tensor.untyped_storage().nbytes()
            if self._remains(size):
                self._staying[key] = storage
                return tensor
            kept = self._known[key] = self._send(tensor, storage, size)
        kept.uses += 1
        return _Packed(
            kept, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self._open, "the backward pass of a micro-batch after the forward pass of another"
        kept = packed.kept
        if kept.here is None:
            self._fetch(kept)
        assert kept.here is not None
        self._copies.wait(kept.arrived)
        view = torch.empty(0, dtype=packed.dtype, device=self._device)
        view.set_(kept.here.untyped_storage(), packed.offset, packed.shape, packed.stride)
        kept.uses -= 1
        if kept.uses <= 0:
            self._copies.wait(kept.copied)  # it may still be read on its way out
            kept.here = None
        self._fetch_before(kept)
        return view

    def close(self) -> None:
        self._open = False
        self._known.clear()
        self._staying.clear()
        self._leaving.clear()
        for kept in self._kept:
            kept.here = None
        self._kept.clear()

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_floating_point():
            return False
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= SMALLEST_OFFLOADED and storage._cdata not in self._weights

    def _remains(self, size: int) -> bool:
        """Whether a new storage is one of the last, which come back at once. Counts it."""
        late = self._begin is not None and self.seen >= self._begin
        self.seen += size
        if not late or size > self._stays:
            return False
        self._stays -= size
        return True

    def _send(self, tensor: Tensor, storage: StorageWeakRef, size: int) -> _Kept:
        here = torch.empty(0, dtype=torch.uint8, device=self._device)
        here.set_(tensor.untyped_storage())
        host = self._pool.take(size)
        copied = self._copies.send(here, host)
        kept = _Kept(len(self._kept), self.seen - size, host, here, storage, copied)
        self._kept.append(kept)
        self._leaving.append(kept)
        self._under_way += size
        while self._under_way > self._layer and len(self._leaving) > 1:
            gone = self._leaving.popleft()
            self._under_way -= gone.host.numel()
            self._copies.wait(gone.copied)  # whatever is computed from here on may have its memory
            gone.here = None
        return kept

    def _fetch(self, kept: _Kept) -> None:
        kept.here, kept.arrived = self._copies.fetch(kept.host, kept.copied, self._device)

    def _fetch_before(self, kept: _Kept) -> None:
        """Asks for what was saved before, a layer's worth. What is wanted out of turn (positions,
        which every layer reads) says nothing about what comes next."""
        at = self._leaving[0].index if self._asked is None else self._asked
        if self._kept[at].start - kept.start > self._layer:
            return
        while at and kept.start - self._kept[at - 1].start <= self._layer:
            at -= 1
            if self._kept[at].here is None and self._kept[at].uses > 0:
                self._fetch(self._kept[at])
        self._asked = at


class _Pool:
    """CPU memory for what one micro-batch saves, used again by the next."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[Tensor] = []
        self._used: list[int] = []

    def take(self, size: int) -> Tensor:
        """Bytes in the first slab that has room."""
        for number, slab in enumerate(self._slabs):
            begin = self._used[number]
            if begin + size <= slab.numel():
                self._used[number] = -(-(begin + size) // ALIGNED) * ALIGNED
                return slab[begin : begin + size]
        wanted = max(SLAB, size)
        self._slabs.append(torch.empty(wanted, dtype=torch.uint8, pin_memory=self._pinned))
        self._used.append(0)
        return self.take(size)

    def reset(self) -> None:
        self._used = [0] * len(self._slabs)


class _InlineCopies:
    """Copies as part of the computation: a CPU has nothing beside it."""

    def send(self, here: Tensor, host: Tensor) -> Any:
        host.copy_(here)

    def fetch(self, host: Tensor, copied: Any, device: torch.device) -> tuple[Tensor, Any]:
        return host.clone(), None

    def wait(self, event: Any) -> None:
        """Lets what is computed from here on wait for a copy."""

    def wait_for_all(self) -> None:
        """Lets what is computed from here on wait for all copies."""


class _OverlappedCopies(_InlineCopies):
    """Copies on streams of their own, one for each direction: the link has both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, here: Tensor, host: Tensor) -> Any:
        self._out.wait_stream(self._current)
        with torch.cuda.stream(self._out):
            host.copy_(here, non_blocking=True)
        return self._out.record_event()

    def fetch(self, host: Tensor, copied: Any, device: torch.device) -> tuple[Tensor, Any]:
        # Memory of the computation's own stream, so that it can be freed there like any other. What
        # was computed in it before has to be over.
        here = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        self._back.wait_stream(self._current)
        self._back.wait_event(copied)
        with torch.cuda.stream(self._back):
            here.copy_(host, non_blocking=True)
        return here, self._back.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            self._current.wait_event(event)

    def wait_for_all(self) -> None:
        self._current.wait_stream(self._out)
        self._current.wait_stream(self._back)

    @property
    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)


def _layers(model: nn.Module) -> int:
    return int(unwrap_model(model).config.get_text_config().num_hidden_layers)
