"""Counts the collectives that a step really sends, and their bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CONTROL_BYTES = 256  # up to so many, a message only agrees on a count, a norm, a flag

_OPS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "reduce_": "reduce_scatter",  # to each owner in turn, which comes to the same
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send_recv",  # counted where it leaves
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
}
_LISTS = {"allgather_": 0, "reduce_scatter_": 1}  # which argument holds the parts


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts messages and their bytes while it is entered, by kind.

    The bytes of a message are those of the undivided tensor: what is gathered, what is reduced.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().split("::")
        if namespace in ("c10d", "_c10d_functional"):
            name = name.split(".")[0]
            if name in _OPS:
                self._note(name, args, result)
        return result

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in _LISTS:  # the older interface: a list of parts, which may overlap the other side
            size = sum(_sizes(args[_LISTS[name]]))
        else:
            size = max(_sizes((args, result)), default=0)
        if size > CONTROL_BYTES:
            self.bytes[_OPS[name]] += size
            self.messages[_OPS[name]] += 1


def _sizes(tree: Any) -> list[int]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [tensor.numel() * tensor.element_size() for tensor in tensors]
