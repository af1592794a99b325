"""How long ranks wait in each schedule, beside the formula.

    python -m benchmarks.pipeline

Real ranks over gloo and torch's own schedules, with stages that sleep instead of computing: the
forward pass, the gradients of inputs and those of weights take the same time on every rank. So what
is measured is the order of work, not a model.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from benchmarks.table import write_table
from shardtune.core.pipeline_schedule import PipelineKind, Pipelining
from shardtune.engine.timer import ComputeTimer
from shardtune.parallel.pipeline.schedules import TimedStage, make_schedule

UNIT = 0.1  # seconds of each of the three parts of a rank's work on one micro-batch
STEPS = 3  # the fastest counts: whatever else the machine does only adds to the waiting
SCHEDULES: dict[PipelineKind, int] = {
    "layers": 1,
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zero_bubble": 2,
}
"""And the stages of each rank."""
CASES = {2: (4, 8), 4: (8, 16)}
"""Micro-batches of a step, by the number of ranks."""


class _Input(torch.autograd.Function):
    """Sleeps in the forward pass, and where the gradient of the input is computed."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return given * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.seconds)
        return gradients[0].contiguous(), None  # a sum's is one number, spread out


class _Weight(torch.autograd.Function):
    """Sleeps where the gradient of the weight is computed, which may be later."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingStage(nn.Module):
    """Takes as long as any other."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, given: Tensor) -> Tensor:
        given = given if given.requires_grad else given.detach().requires_grad_()
        found: Tensor = _Input.apply(given, self.seconds) + _Weight.apply(self.weight, self.seconds)
        return found


def measured(kind: PipelineKind, chunks: int, ranks: int, microbatches: int) -> float:
    """The time that this rank waits as a share of the time that it works, in the best step."""
    order = Pipelining(kind, chunks)
    owners, rows = order.ranks(ranks), torch.ones(microbatches, 8)
    together = 1 if kind == "layers" else microbatches
    stages: list[Any] = [
        TimedStage(
            ComputeTimer(torch.device("cpu")),
            SleepingStage(UNIT / chunks),
            number,
            len(owners),
            torch.device("cpu"),
            input_args=torch.empty(1, 8, device="meta", requires_grad=number > 0),
            output_args=torch.empty(1, 8, device="meta", requires_grad=True),
        )
        for number, owner in enumerate(owners)
        if owner == dist.get_rank()
    ]
    schedule = make_schedule(order, ranks, stages, together, lambda found, _: found.sum())
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        since = time.perf_counter()
        for begin in range(0, microbatches, together):
            given = rows[begin : begin + together]
            schedule.step(*((given,) if owners[0] == dist.get_rank() else ()), target=given)
        dist.barrier()
        seconds.append(time.perf_counter() - since)
    return min(seconds) / (3 * UNIT * microbatches) - 1


def rank_main(rank: int, ranks: int, store: str, answer: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = [
        (kind, chunks, ranks, microbatches, measured(kind, chunks, ranks, microbatches))
        for microbatches in CASES[ranks]
        for kind, chunks in SCHEDULES.items()
    ]
    if rank == 0:
        Path(answer).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in CASES:
            store, answer = (str(Path(folder) / f"{name}{ranks}") for name in ("store", "answer"))
            multiprocessing.spawn(rank_main, (ranks, store, answer), nprocs=ranks)
            for kind, chunks, _, count, bubble in json.loads(Path(answer).read_text()):
                order = Pipelining(kind, chunks)
                rows.append(
                    [
                        str(ranks),
                        str(count),
                        f"`{kind}`",
                        f"{order.bubble(ranks, count):.3f}",
                        f"{bubble:.3f}",
                        f"{order.utilisation(ranks, count):.0%}",
                        f"{1 / (1 + bubble):.0%}",
                    ]
                )
    write_table(
        "pipeline",
        "Pipeline bubbles",
        [
            "ranks",
            "micro-batches",
            "schedule",
            "bubble, formula",
            "bubble, measured",
            "utilisation, formula",
            "utilisation, measured",
        ],
        rows,
        "The bubble is the time that a rank waits, as a share of the time that it works: "
        "(p - 1) / m for p ranks and m micro-batches, half of that with two stages a rank "
        "(`interleaved`), p - 1 for `layers`, and (p - 1) / 6m for `zero_bubble`: gradients are "
        "clipped by the norm of all stages, so every step begins anew. Stages sleep: "
        f"{UNIT * 1e3:.0f} ms for each of "
        "forward pass, gradients of inputs and gradients of weights. What is measured above the "
        "formula is torch's and gloo's own time, some 10 ms for each micro-batch.",
    )


if __name__ == "__main__":
    main()
