"""Matmul speed: which precisions a device is fast in, and so which mixed precision it trains in.

torch says that bf16 is supported on CPUs where a product in it takes four times as long as in fp32.
So a CPU is measured, in milliseconds (`kernels/measure_matmul.py`), and the figures are cached for
this CPU and this torch. A GPU's generation tells.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import get_args

from shardtune.core.files.atomic_write import atomic_write
from shardtune.core.files.cache import cache_dir, file_lock
from shardtune.core.setup import Precision
from shardtune.errors import JobError, Problem

FAST_PRECISIONS = "SHARDTUNE_FAST_PRECISIONS"
"""Environment variable: what to take for fast here instead of measuring, such as `bf16,fp16`;
`fp32` says that neither is."""
AS_FAST = 0.9
"""A 16-bit precision counts as fast from this share of fp32's rate on: it halves the memory. CPUs
with instructions for it are far above, others far below."""

_FORMAT = "3"
"""Of the kept figures: others are measured anew."""
_LIMITS = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")
"""Environment variables by which torch and oneDNN are kept from instructions that a CPU has."""


@dataclass(frozen=True)
class MatmulSpeed:
    """The precisions that a device is fast in, and how that is known."""

    fast: tuple[Precision, ...]
    why: str
    """Why bf16 is fast or isn't, for a person."""
    tflops: Mapping[Precision, float] = field(default_factory=dict)
    """10^12 operations a second of one core, where it was measured; 0 where the CPU has no
    instructions for it."""

    def best(self, *, gpu: bool) -> tuple[Precision, str]:
        """What to train in, and the reason. On a GPU fp16 is the way out, as it scales the loss; on
        a CPU fp32, which is faster there."""
        if "bf16" in self.fast:
            return "bf16", self.why
        if gpu and "fp16" in self.fast:
            return "fp16", f"{self.why}: fp16 with loss scaling"
        return "fp32", self.why


def gpu_matmul_speed(name: str, *, bf16: bool) -> MatmulSpeed:
    """That of a GPU: bf16 came with Ampere (compute capability 8.0)."""
    if bf16:
        return MatmulSpeed(("bf16", "fp16"), f"{name} is fast in bf16")
    return MatmulSpeed(("fp16",), f"{name} is older than Ampere and has no bf16")


def forced_matmul_speed() -> MatmulSpeed | None:
    """What the environment says of this machine, if it says anything."""
    said = os.environ.get(FAST_PRECISIONS)
    if said is None:
        return None
    words = [word for word in re.split(r"[,\s]+", said) if word]
    known = get_args(Precision)
    if unknown := [word for word in words if word not in known]:
        fact = f"{unknown[0]!r} is no precision"
        raise JobError(Problem(FAST_PRECISIONS, fact, f"name some of {', '.join(known)}"))
    fast: tuple[Precision, ...] = tuple(each for each in known if each in words)
    return MatmulSpeed(fast, f"{FAST_PRECISIONS}={said}")


def cpu_matmul_speed(measure: Callable[[], Mapping[Precision, float]]) -> MatmulSpeed:
    """That of this CPU: as the environment says, as it was measured before, or measured now.

    Processes that ask at the same time measure one after the other, and all but the first find it
    done. Where nothing can be kept, each measures for itself.
    """
    if (forced := forced_matmul_speed()) is not None:
        return forced
    path = cache_dir() / "matmul" / f"{_key()}.json"
    if (kept := _read(path)) is not None:
        return _judged(kept)
    try:
        with file_lock(path.with_name(f".{path.name}.lock")):
            if (kept := _read(path)) is None:  # nobody else has measured meanwhile
                kept = dict(measure())
                atomic_write(path, json.dumps({"cpu": cpu_name(), "tflops": kept}))
    except OSError:
        kept = kept or dict(measure())
    return _judged(kept)


def _judged(tflops: Mapping[Precision, float]) -> MatmulSpeed:
    least = AS_FAST * tflops["fp32"]
    fast: tuple[Precision, ...] = tuple(each for each, rate in tflops.items() if rate >= least)
    if not tflops["bf16"]:
        return MatmulSpeed(fast, f"this CPU, {cpu_name()}, has no bf16 instructions", tflops)
    ratio = tflops["bf16"] / tflops["fp32"]
    if "bf16" in fast:
        how = f"are {ratio:.1f} times as fast as" if ratio >= 1.1 else "are as fast as"
    else:
        how = f"take {1 / ratio:.1f} times as long as"
    return MatmulSpeed(fast, f"bf16 matmuls {how} fp32 ones on this CPU, {cpu_name()}", tflops)


def _read(path: Path) -> dict[Precision, float] | None:
    """What was measured; None where there is nothing, or nothing that makes sense."""
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))["tflops"]
        found: dict[Precision, float] = {each: float(rates[each]) for each in get_args(Precision)}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    sound = all(math.isfinite(rate) and rate >= 0 for rate in found.values())
    return found if sound and found["fp32"] > 0 else None


def _key() -> str:
    """Of what the figures hold for: the CPU as this system shows it, torch and its libraries."""
    libraries = [f"{name} {_version(name)}" for name in ("torch", "mkl", "numpy")]
    limits = [f"{name}={os.environ.get(name)}" for name in _LIMITS]
    said = "\n".join([_FORMAT, cpu_name(), _cpu()["flags"], *libraries, *limits])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def cpu_name() -> str:
    """As its maker calls it."""
    return _cpu()["name"]


@cache
def _cpu() -> dict[str, str]:
    """The first CPU's name, and the instructions that it has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line.partition(":") for line in text.split("\n\n")[0].splitlines()]
    said = {key.strip(): value.strip() for key, _, value in lines}
    # ARM's kernel has no name for it, only its maker's numbers.
    part = [said[key] for key in ("CPU implementer", "CPU part") if key in said]
    name = said.get("model name") or " ".join([platform.machine(), *part])
    return {"name": name, "flags": said.get("flags") or said.get("Features") or ""}
