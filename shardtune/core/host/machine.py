"""What this machine has, found without importing torch (a second) or starting a driver."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from shardtune.core.host.matmul_speed import MatmulSpeed


@dataclass(frozen=True)
class Machine:
    """Processor cores that we may use, and CUDA devices that we can see."""

    cores: int
    gpus: int
    gpu_name: str = ""
    """What the driver calls the first of them."""
    memory: int = 0
    """Bytes of CPU memory; 0 if unknown."""
    matmul: MatmulSpeed | None = None
    """What the GPUs, or else the cores, are fast in; None if unknown."""
    omp_threads: int | None = None
    """Threads a process is to have, where the environment says so."""

    @staticmethod
    def here() -> Machine:
        return Machine(_cores(), _gpus(), _gpu_name(), _memory(), omp_threads=_omp_threads())


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # a container may be given fewer than all
    return len(affinity(0)) if affinity else (os.cpu_count() or 1)


def _omp_threads() -> int | None:
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # then of nested levels
    return int(first) if first.isdecimal() and int(first) else None


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _driver() -> Path:
    """Where NVIDIA's driver tells of each GPU."""
    return Path("/proc/driver/nvidia/gpus")


def _gpu_name() -> str:
    for file in sorted(_driver().glob("*/information")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip()
    return ""


def _gpus() -> int:
    folder = _driver()
    present = len(list(folder.iterdir())) if folder.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # As the driver reads it: what stands behind an invalid name isn't seen.
    named = takewhile(lambda part: part.strip() not in ("", "-1"), visible.split(","))
    return min(present, len(list(named)))
