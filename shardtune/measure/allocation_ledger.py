"""The allocation ledger: every tensor's memory while a step runs, on real tensors or on fake ones.

It sees each operation, notes the storages that come into being and is told when they go. What is
left is a timeline from which the peak follows, and what made it up.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardtune.plan.estimate.memory_timeline import MemoryClass, MemoryPhase

ALLOCATOR_GRAIN = 512  # bytes to which CUDA's allocator rounds every request
_GATHERING = "fsdp::split_with_sizes_copy"  # FSDP2 writes gathered weights with it
_CAST = "aten::_to_copy"
_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Allocation:
    """A storage came, went or changed its size; `change` is in bytes, rounded as on a GPU."""

    storage: int
    change: int
    moment: MemoryPhase


class AllocationLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes storages while it is entered. `device` is the kind of device that is watched."""

    def __init__(self, device: str, *, vocabulary: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.vocabulary = vocabulary
        """The last dimension by which logits are known."""
        self.moment: MemoryPhase = "building"
        self.events: list[Allocation] = []
        self.kept = 0
        """Bytes that forward passes made and left for the backward pass, at most; without logits
        and their like."""
        self._imagining = 0
        self._number: dict[int, int] = {}
        """The number of each living storage, by the address of its C++ object."""
        self._size: dict[int, int] = {}
        self._class: dict[int, MemoryClass] = {}
        self._born: dict[int, MemoryPhase] = {}
        self._gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented  # it takes itself apart; we want to see what it does with a share
        if func is _DEVICE:
            return args[0].device  # asked very often
        if _imagining() > self._imagining:
            # DTensor computes what shape a whole result would have; no such thing is allocated.
            return func(*args, **(kwargs or {}))
        name = func.name()
        self._turn()
        self._look_at_gathered()
        result = func(*args, **(kwargs or {}))
        made_by_us = torch.is_grad_enabled()  # also when a checkpointed layer is computed again
        for tensor in tensors_in(result):
            self._note(tensor, made_by_us)
        if name.startswith(_CAST) and self._class_of(args[0]) == "params":
            self._class[self._number_of(result)] = "buffers"
        if name.startswith(_GATHERING):
            for tensor in tensors_in((*args, *(kwargs or {}).values())):
                self._watch(tensor)
        return result

    def __enter__(self) -> AllocationLedger:
        self._imagining = _imagining()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    # What the caller tells us ------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A micro-batch begins. Backward and update announce themselves."""
        self.moment = "forward"

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that may have been there before."""
        for tensor in tensors:
            self._note(tensor, made_by_us=False)

    def classify(
        self,
        parameters: Iterable[Tensor],
        gradients: Iterable[Tensor],
        beside: Iterable[Tensor] = (),
    ) -> None:
        """Says what the storages are that outlive a step. Call after building and after each step.

        What came with an update and stayed belongs to the optimizer; so does what it keeps of
        weights `beside` the model.
        """
        for number in self._number.values():
            if self._born[number] == "optimizer":
                self._class[number] = "optimizer"
        for tensor in beside:
            self._class[self._number_of(tensor)] = "optimizer"
        for tensor in parameters:
            self._class[self._number_of(tensor)] = "params"
        for tensor in gradients:
            self._class[self._number_of(tensor)] = "gradients"

    # What comes out ----------------------------------------------------------------------------

    def peaks(
        self,
        *,
        since: int = 0,
        until: int | None = None,
        without: frozenset[MemoryClass] = frozenset(),
    ) -> dict[MemoryPhase, dict[MemoryClass, int]]:
        """The highest point of each moment between two numbers of events, and what made it up.

        Classes in `without` lie somewhere else and don't count.
        """
        now: Counter[MemoryClass] = Counter()
        total = 0
        highest: dict[MemoryPhase, int] = {}
        found: dict[MemoryPhase, dict[MemoryClass, int]] = {}
        for index, event in enumerate(self.events[:until]):
            kind = self._class[event.storage]
            if kind in without:
                continue
            now[kind] += event.change
            total += event.change
            grown = event.change > 0 and total > highest.get(event.moment, 0)
            if grown and index >= since:
                highest[event.moment] = total
                found[event.moment] = dict(now)
        return found

    # How it is kept ----------------------------------------------------------------------------

    def _turn(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            if self.moment == "forward":
                self.kept = max(self.kept, self._left_behind())
            self.moment = "backward"
        elif self.moment == "backward":
            self.moment = "optimizer"

    def _left_behind(self) -> int:
        return sum(
            self._size[number]
            for number in self._number.values()
            if self._born[number] == "forward" and self._class[number] in ("activations", "buffers")
        )

    def _note(self, tensor: Tensor, made_by_us: bool) -> None:
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._number.get(key)
        if number is None:
            number = len(self._class)
            self._number[key] = number
            self._size[number] = 0
            self._born[number] = self.moment
            self._class[number] = self._first_class(tensor, made_by_us)
            weakref.finalize(storage, self._gone, key, number)
        self._resize(number, storage.nbytes())

    def _first_class(self, tensor: Tensor, made_by_us: bool) -> MemoryClass:
        if self.moment == "building":
            return "buffers"
        if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            return "logits"
        return "activations" if made_by_us else "buffers"

    def _watch(self, tensor: Tensor) -> None:
        """FSDP2 gives and takes the memory of a gathered weight without an operation."""
        storage = tensor.untyped_storage()
        number = self._number.get(storage._cdata)
        if number is not None:
            self._resize(number, storage.nbytes())
            self._gathered[number] = weakref.ref(storage)

    def _look_at_gathered(self) -> None:
        for number, reference in list(self._gathered.items()):
            storage = reference()
            if storage is None or storage.nbytes() == 0:
                del self._gathered[number]
                self._resize(number, 0)

    def _gone(self, key: int, number: int) -> None:
        del self._number[key]
        self._resize(number, 0)

    def _resize(self, number: int, size: int) -> None:
        rounded = -(-size // ALLOCATOR_GRAIN) * ALLOCATOR_GRAIN
        change = rounded - self._size[number]
        if change:
            self._size[number] = rounded
            self.events.append(Allocation(number, change, self.moment))

    def _number_of(self, tensor: Tensor) -> int:
        return self._number.get(tensor.untyped_storage()._cdata, -1)

    def _class_of(self, tensor: Tensor) -> MemoryClass | None:
        return self._class.get(self._number_of(tensor))


def _imagining() -> int:
    """How many times fake tensors have been switched on."""
    mode = active_fake_mode()
    return len(mode.enter_stack) if mode is not None else 0


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, which nest lists only."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from tensors_in(branch)
