"""Where the GPU's time in a step goes: kernels by what they compute."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

KINDS: dict[str, str] = {
    "attention": r"sdpa|fmha|flash|attention|cudnn::fusion",
    "products": r"gemm|nvjet|cutlass|xmma|splitk|triton_tem",
    "loss": r"cross_entropy",
    "update": r"adam|^_update_kernel|multi_tensor|lpnorm",
}
"""What the names of kernels hold, in the order in which they are asked."""
PASSES = "other passes"
"""Norms, additions, activations, RoPE, embeddings, casts, copies: all else."""
IDLE = "idle"
STEPS = 2
ON_THE_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def kernel_seconds(step: Callable[[int], Any], first: int) -> dict[str, float]:
    """Seconds of a step by kind of kernel, and those in which nothing ran; of `STEPS` steps that
    begin with number `first`, their mean."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for number in range(first, first + STEPS):
            step(number)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return {kind: seconds / STEPS for kind, seconds in by_kind(events).items()}


def by_kind(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Of the events of a trace, whose times are microseconds. Kernels that ran beside each other
    both count; idle is what no kernel covers between the first and the last."""
    found = dict.fromkeys((*KINDS, PASSES, IDLE), 0.0)
    end = None
    ran = [each for each in events if each.get("cat") in ON_THE_GPU]
    for event in sorted(ran, key=lambda each: float(each["ts"])):
        found[kind_of(event["name"])] += event["dur"] / 1e6
        begin = float(event["ts"])
        if end is not None and begin > end:
            found[IDLE] += (begin - end) / 1e6
        end = max(end or 0.0, begin + event["dur"])
    return found


def kind_of(name: str) -> str:
    """By the name of a kernel."""
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if re.search(words, lower)), PASSES)
