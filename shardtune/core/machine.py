"""What this machine has, found without importing torch (a second) or starting a driver."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Processor cores that we may use, and CUDA devices that we can see."""

    cores: int
    gpus: int

    @staticmethod
    def here() -> Machine:
        return Machine(cores=_cores(), gpus=_gpus())


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # a container may be given fewer than all
    return len(affinity(0)) if affinity else (os.cpu_count() or 1)


def _gpus() -> int:
    folder = Path("/proc/driver/nvidia/gpus")
    present = len(list(folder.iterdir())) if folder.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # As the driver reads it: what stands behind an invalid name isn't seen.
    named = takewhile(lambda part: part.strip() not in ("", "-1"), visible.split(","))
    return min(present, len(list(named)))
