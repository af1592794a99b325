"""One method on one row of `benchmarks.gpu`, in a process of its own: it prints its figures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_card import clocked, loss_of
from benchmarks.gpu_cases import COMMAND, PEERS, Case, our_job
from benchmarks.gpu_data import Batch, batches, config_of, draw, flops
from benchmarks.gpu_kernels import kernel_seconds
from benchmarks.gpu_peers import build, write_checkpoint
from benchmarks.gpu_sample import case_of
from benchmarks.gpu_train import measure_train
from shardtune.config.job import Job
from shardtune.core.engine import Engine
from shardtune.core.world import World
from shardtune.models.builder import MetaModelBuilder
from shardtune.models.weight_files import NoFiles
from shardtune.training.engine_setup import make_plan

WARM = 4  # steps before the clock: the first compiles, and each batch is seen once
GIB = 2**30


@dataclass(frozen=True)
class DrawnWeights(NoFiles):
    """The weights that every method has, by their names."""

    device: str

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, draw(name, self.shapes[name], self.device)


def ours(
    case: Case, method: str, data: list[Batch], device: str, *, tiny: bool
) -> Callable[[int], Any]:
    """Our engine as a job starts it, on drawn weights instead of files. Batches are sent a step
    ahead, as in a run; the peers' are all on the device already."""
    job = Job.model_validate_json(json.dumps(our_job(case, method, tiny=tiny)))
    engine = engine_of(job, config_of(case, tiny=tiny), device, told=device).__enter__()
    staged: dict[int, Any] = {}

    def stage(number: int) -> Any:
        return engine.stage([data[number % len(data)].ours])

    def step(number: int) -> Any:
        result = engine.step(staged.pop(number, None) or stage(number))
        staged[number + 1] = stage(number + 1)
        return result

    return step


def engine_of(job: Job, config: Any, device: str, *, told: str, steps: int = 1000) -> Engine:
    """The engine of a job on drawn weights. Attention is chosen as for a machine with `told`."""
    plan = make_plan(job, 1, steps)
    empty = MetaModelBuilder.of(config, job.model, job.adapter, job.train, told)
    names = empty.frame.names
    assert isinstance(names.files, NoFiles)
    drawn = replace(names, files=DrawnWeights(names.files.shapes, device))
    builder = replace(empty, frame=replace(empty.frame, names=drawn))
    world = World(device="cuda:0" if device == "cuda" else device)
    return plan.strategy.build(builder, plan.setup, world)


def measure(
    case: Case, method: str, *, steps: int, device: str, tiny: bool, kernels: bool = False
) -> dict[str, Any]:
    """The figures of one method; its memory is the process's own. `kernels`: with the seconds of
    each kind of kernel, of steps after those that are timed."""
    if method == COMMAND:
        return measure_train(case, warm=WARM, steps=steps, device=device, tiny=tiny)
    torch.manual_seed(0)
    config = config_of(case, tiny=tiny)
    data = batches(case, config.vocab_size, tiny=tiny)
    if method in case.ours:
        step = ours(case, method, data, device, tiny=tiny)
    else:
        step = build(case, PEERS[method], data, device, tiny=tiny)
    begun = time.perf_counter()
    losses = [loss_of(step(0))]
    first = time.perf_counter() - begun
    if device == "cuda":
        # Before a CUDA graph is recorded: what its kernels use is never allocated again.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    losses += [loss_of(step(number)) for number in range(1, WARM)]
    seconds, timed = clocked(step, range(WARM, WARM + steps), device)
    losses += timed
    done = [data[number % len(data)] for number in range(WARM, WARM + steps)]
    rates = [
        (batch.ours.labels if case.packed else batch.ours.input_ids.numel()) / taken
        for batch, taken in zip(done, seconds, strict=True)
    ]
    work = [flops(case, config, batch) / taken for batch, taken in zip(done, seconds, strict=True)]
    profiled = kernels and device == "cuda"
    extra = {"kernels": kernel_seconds(step, WARM + steps)} if profiled else {}
    return extra | {
        "seconds": median(seconds),
        "tokens_per_second": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "flops_per_second": median(work),
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if device == "cuda" else None,
        "first_step_seconds": first,
        "losses": losses,
        "steps": steps,
    }


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", help="a row of the table, or `sample SEED.NUMBER`")
    parser.add_argument("method", nargs="?", default="")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="with the time of their kinds")
    parser.add_argument("--layers", type=int, help="fewer: fills torch's cache, measures nothing")
    parser.add_argument("--write", type=Path, help="only write the row's weights to this folder")
    options = parser.parse_args(given)
    device = "cpu" if options.tiny else "cuda"
    case = replace(case_of(options.case), layers=options.layers)
    if options.write:
        write_checkpoint(case, options.write, device, tiny=options.tiny)
        return 0
    if options.method in PEERS and PEERS[options.method].tool == "unsloth":
        import unsloth  # noqa: F401 - it wants to change the others before they are used
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    if not sys.stdin.readline():  # whoever started us says when the card is ours
        return 1
    found = measure(
        case,
        options.method,
        steps=options.steps,
        device=device,
        tiny=options.tiny,
        kernels=options.kernels,
    )
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
