"""Products in bf16 and fp16 on a CPU that is slow in them, because it has no such instructions.

On x86 torch then takes three to thirteen times as long as in fp32. On ARM (Graviton 2, Ampere
Altra) it asks oneDNN for each product in vain, warns of it in fifty lines, and then multiplies
number by number: a hundred times slower. Here what goes in is widened, and the result is rounded
once, as it is where a product is added up in fp32. Products that write into given memory (`out=`)
stay slow.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from shardtune.compat.versioned_change import change

ROUNDED = {
    "mm": 1,
    "addmm": 1,
    "bmm": 1,
    "baddbmm": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}
"""Operations, and how many of their results, the first ones, are as precise as what went in."""

_registered: list[Any] = []
_slow: set[torch.dtype] = set()


def widen_products(slow: Collection[torch.dtype]) -> None:
    """For this process, those of these types."""
    _slow.clear()
    _slow.update(each for each in slow if each.itemsize == 2)
    if _slow and not _registered:
        _override_products()


@change("torch", since="2.10", before="2.15", lost="16-bit matmuls are slow on this CPU")
def _override_products() -> None:
    made = {name: _widened(name, rounded) for name, rounded in ROUNDED.items()}
    if platform.machine() == "aarch64":  # where it fails in other operations, too
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _registered.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was another one before
        for name, widened in made.items():
            library.impl(name, widened, "CPU", with_keyset=True)


def _widened(name: str, rounded: int) -> Callable[..., Any]:
    attends = "attention" in name
    kernel: Any = torch.library.get_kernel(f"aten::{name}", "CPU")

    def called(keys: Any, *given: Any, **named: Any) -> Any:
        tensors = [each for each in (*given, *named.values()) if isinstance(each, Tensor)]
        dtype = tensors[0].dtype
        alike = all(each.dtype == dtype for each in tensors)
        # Numbers of two kinds are refused, as elsewhere; a mask or a sum may be wider.
        if dtype not in _slow or not (alike or attends):
            return kernel.call_boxed(keys, *given, **named)
        wide = {key: _wide(each) for key, each in named.items()}
        found = kernel.call_boxed(keys, *map(_wide, given), **wide)
        if isinstance(found, Tensor):
            return found.to(dtype)
        return (*(each.to(dtype) for each in found[:rounded]), *found[rounded:])

    return called


def _wide(given: Any) -> Any:
    narrow = isinstance(given, Tensor) and given.dtype in _slow
    return given.float() if narrow else given
