"""What torch is told through the environment, before a rank touches its GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardtune.core.files.cache import cache_dir

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where torch looks for it: the name of today, and two older ones."""
COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "compiled", "TRITON_CACHE_DIR": "kernels"}
"""Where torch's compiler and triton keep what they have made, and what they have found fastest."""


def quiet_sockets() -> None:
    """torch's sockets warn of each address that no DNS knows, and print a stack of C++ frames for a
    peer that has gone. Who uses them says in words what failed, so errors alone are printed, here
    and in the ranks; torch reads this when it is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def torch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that `environment` lacks. What a person has set in it is left alone.

    Rows differ in length, and with them every tensor of a step: segments that can grow leave no
    gaps between them that the next step can't use. Compiled kernels are kept where we keep other
    things, and not in a temporary folder: the next run, and the next rank, finds them.
    """
    found = {}
    if not any(name in environment for name in ALLOCATOR):
        found[ALLOCATOR[0]] = "expandable_segments:True"
    for name, folder in COMPILER_CACHES.items():
        if name not in environment:
            found[name] = str(cache_dir() / folder)
    return found
