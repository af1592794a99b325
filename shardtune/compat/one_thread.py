"""Products on one thread: torch's own setting, and a library's that doesn't heed it.

On ARM torch multiplies by the Arm Compute Library, which takes the number of threads from the
environment when it is loaded and asks OpenMP for as many in every product, whatever
`torch.set_num_threads` says (seen with torch 2.13). Where OpenMP may adjust that number
(`omp_set_dynamic`), it gives no more than torch has set.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_OPENMP = "libgomp.so.1"


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, this thread computes its products alone; afterwards all is as it was."""
    threads, openmp = torch.get_num_threads(), _loaded_openmp()
    adjusts = openmp.omp_get_dynamic() if openmp else 0
    torch.set_num_threads(1)
    if openmp:
        openmp.omp_set_dynamic(1)
    try:
        yield
    finally:
        if openmp:
            openmp.omp_set_dynamic(adjusts)
        torch.set_num_threads(threads)


def _loaded_openmp() -> ctypes.CDLL | None:
    """GNU's, if it is the one that torch has loaded."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return ctypes.CDLL(_OPENMP, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
