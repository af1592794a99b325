"""glibc's allocator: memory that is freed goes back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardtune.compat.versioned_change import say_once

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def give_back_memory() -> None:
    """Lets the system have the memory that an undivided part of a model took.

    The C library keeps what is freed for later; between the shards that stay, later rarely comes,
    and the process would grow by far more than its share (41 of 140 MiB were such holes).
    """
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


@contextmanager
def freed_memory_goes_back() -> Iterator[None]:
    """Lets the system have the memory of a large tensor as soon as it is freed.

    At first the C library maps what is at least 128 KiB by itself. It raises that limit when such a
    tensor is freed, and from then on grows by what lies between tensors: by 20 to 60 MiB while
    DeepSpeed gathers every weight once to hang its hooks on it.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, 128 << 10)
    mallopt(_TRIM_THRESHOLD, 128 << 10)
    try:
        yield
    finally:  # the highest that the library goes by itself; training uses its memory again at once
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)


def _of_glibc(name: str) -> Any:
    """A function that only glibc has; None elsewhere."""
    found = getattr(ctypes.CDLL(None), name, None)
    if found is None:
        say_once(f"the C library has no {name}: memory between tensors stays with the process")
    return found
