"""Products in bf16 on an ARM CPU that has no instructions for them (Graviton 2, Ampere Altra).

torch asks oneDNN for each in vain, warns of it in fifty lines, and then multiplies number by
number: a hundred times slower than in fp32. Here what goes in is widened, and the result is rounded
once, as it is where a product is added up in fp32. Products that write into given memory (`out=`)
stay slow.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
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


def is_slow() -> bool:
    """Whether this CPU is of that kind."""
    asked: Any = torch.ops.mkldnn
    known = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return known and platform.machine() == "aarch64" and not asked._is_mkldnn_bf16_supported()


def widen_products() -> None:
    """For this process, where it is worth it."""
    if not _registered and is_slow():
        _override_products()


@change("torch", since="2.10", before="2.15", lost="bf16 is a hundred times slower on this CPU")
def _override_products() -> None:
    made = {name: _widened(name, rounded) for name, rounded in ROUNDED.items()}
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
        narrow = [each.dtype == torch.bfloat16 for each in tensors]
        # Numbers of two kinds are refused, as elsewhere; a mask or a sum may be wider.
        if not (all(narrow) or (attends and any(narrow))):
            return kernel.call_boxed(keys, *given, **named)
        wide = {name: _wide(each) for name, each in named.items()}
        found = kernel.call_boxed(keys, *map(_wide, given), **wide)
        if isinstance(found, Tensor):
            return found.bfloat16()
        return (*(each.bfloat16() for each in found[:rounded]), *found[rounded:])

    return called


def _wide(given: Any) -> Any:
    narrow = isinstance(given, Tensor) and given.dtype == torch.bfloat16
    return given.float() if narrow else given
