"""Python's garbage collector, kept out of imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """For the import of torch, transformers and peft: half a million objects that all stay. The
    collector would look through them again and again, which is a sixth of the time; now it never
    does, in training neither."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
