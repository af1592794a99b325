"""The fast path computes what the plain one does: losses of as many steps from the same start.

    python -m benchmarks.equality

Noise of bf16 is what it is compared with, and that is measured in two ways, on the same weights and
tokens: by the plain path once more with other kernels (SDPA's flash attention in the place of
cuDNN's), and by the plain path in fp32, from which each path in bf16 is some way off. The fast one
rounds less often than the plain one (what LoRA adds is added before the sum is rounded, so little
of it is lost): it may differ from the plain path by more than two plain ones from each other, but
not from fp32 by more than they do.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from benchmarks.gpu_cases import Case
from benchmarks.gpu_data import batches, config_of
from benchmarks.gpu_run import engine_of
from benchmarks.table import write_table
from shardtune.config.job import Job

PLAIN = {"precision": "bf16", "kernels": "eager", "loss": "plain"}
FAST = {"precision": "bf16", "kernels": "compiled", "loss": "fused"}
WAYS: dict[str, dict[str, Any]] = {
    "plain, fp32": PLAIN | {"precision": "fp32"},
    "plain": PLAIN,
    "plain, other kernels": PLAIN,
    "fast": FAST,
    "fast, fp8": FAST,
}
"""`train` of each."""
STORED = {"fast, fp8": {"quantization": "fp8"}}
"""`model` of those whose frozen weights are stored otherwise."""
LORA = {"adapter": {"type": "lora", "rank": 16}}


def losses(case: Case, way: str, steps: int, device: str, *, tiny: bool) -> list[float]:
    """Of each step of a run of its own, from the same weights, on the same tokens."""
    train = {"micro_batch": case.rows, "global_batch": case.rows, "steps": steps, **WAYS[way]}
    if tiny:
        train["kernels"] = "eager"
    document = {
        "launch": {"processes": 1},
        **(LORA if case.lora else {}),
        "model": {"name": case.model, **STORED.get(way, {})},
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": case.length},
        "train": train,
    }
    job = Job.model_validate_json(json.dumps(document))
    config = config_of(case, tiny=tiny)
    data = batches(case, config.vocab_size, tiny=tiny)
    # Only the fast path is told of documents: the plain one is what transformers makes of it.
    told = device if way.startswith("fast") else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(way != "plain, other kernels")
    with engine_of(job, config, device, told=told, steps=steps) as engine:
        found = [engine.step([data[n % len(data)].ours]).loss for n in range(steps)]
    del engine
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    torch._dynamo.reset()
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--all-weights", action="store_true", help="no adapter")
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU; writes nothing")
    options = parser.parse_args(given)
    case = Case("equality", options.model, options.rows, options.length, ())
    case = replace(case, lora=not options.all_weights)
    device = "cpu" if options.tiny else "cuda"
    ways = [way for way in WAYS if case.lora or "fp8" not in way]
    runs = {way: losses(case, way, options.steps, device, tiny=options.tiny) for way in ways}
    rows = []
    for way in ways[1:]:
        exact, plain = apart(runs["plain, fp32"], runs[way]), apart(runs["plain"], runs[way])
        figures = (f"{figure(each):.1e}" for each in (exact, plain) for figure in (mean, max))
        rows.append([way, *figures, f"{runs[way][-1]:.4f}"])
    if not options.tiny:
        write_table(
            "equality" if case.lora else "equality_all_weights",
            "Fused and plain steps",
            ["", "from fp32: mean", "largest", "from plain: mean", "largest", "last loss"],
            rows,
            f"{options.steps} steps of {options.rows} x {options.length} random tokens from the "
            f"same weights, {options.model}'s shape, "
            f"{'LoRA of rank 16' if case.lora else 'full fine-tune'}, bf16: how far the loss of a "
            "step is from that of the plain path in fp32, and from that of the plain path in bf16.",
            command="equality" if case.lora else "equality --all-weights",
        )
    print(json.dumps(runs))
    off = {way: mean(apart(runs["plain, fp32"], runs[way])) for way in ways}
    return int(off["fast"] > 1.2 * off["plain"] and not options.tiny)


def apart(some: list[float], others: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(some, others, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
