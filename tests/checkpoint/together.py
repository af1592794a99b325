"""Several ranks in one process: threads that meet, and checkpoints that they save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardtune.checkpoint.async_saver import AsyncSaver, CheckpointIdentity
from shardtune.core.progress import Progress
from shardtune.core.tensor_shards import Region, TensorShard

Answer = TypeVar("Answer")


class _Table:
    def __init__(self, size: int) -> None:
        self.said = [""] * size
        self.barrier = threading.Barrier(size, timeout=60)


@dataclass(frozen=True)
class ThreadRank:
    """What saving needs of a rank."""

    rank: int
    size: int
    table: _Table

    def all_gather(self, text: str) -> list[str]:
        self.table.said[self.rank] = text
        self.table.barrier.wait()
        said = list(self.table.said)
        self.table.barrier.wait()
        return said

    def any(self, flag: bool) -> bool:
        return any(map(bool, self.all_gather("1" * flag)))


def together(ranks: int, act: Callable[[ThreadRank], Answer]) -> list[Answer]:
    """`act` on each rank; raises what a rank raised."""
    table = _Table(ranks)
    answers: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            answers[rank] = act(ThreadRank(rank, ranks, table))
        except BaseException as error:
            errors[rank] = error
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        real = [e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)]
        raise (real or list(errors.values()))[0]
    return [answers[rank] for rank in range(ranks)]


def state(step: int) -> dict[str, Tensor]:
    """Tensors of every kind that occurs, other ones in each step."""
    draw = torch.Generator().manual_seed(step)
    return {
        "weight.a.b": torch.randn(7, 5, generator=draw),
        "exp_avg.a.b": torch.randn(7, 5, generator=draw),
        "weight.norm": torch.randn(6, generator=draw),
        "exp_avg.norm": torch.randn(6, generator=draw).bfloat16(),
        "step.a.b": torch.tensor(float(step)),
    }


def rows(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> list[TensorShard]:
    """Cut along the first dimension, as FSDP does; the first rank has what can't be cut."""
    found = []
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if not shape:
            found += [TensorShard(key, shape, Region.whole(shape), tensor)] if rank == 0 else []
            continue
        begin, end = (shape[0] * n // ranks for n in (rank, rank + 1))
        cut = Region((begin, *[0] * (len(shape) - 1)), (end - begin, *shape[1:]))
        found.append(TensorShard(key, shape, cut, tensor[begin:end]))
    return found


def stretches(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> list[TensorShard]:
    """Cut anywhere, as ZeRO does."""
    found = []
    for key, tensor in tensors.items():
        size = tensor.numel()
        begin, end = (size * n // ranks for n in (rank, rank + 1))
        if end > begin:
            cut = Region((begin,), (end - begin,), flat=True)
            found.append(TensorShard(key, tuple(tensor.shape), cut, tensor.flatten()[begin:end]))
    return found


def columns(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> list[TensorShard]:
    """Cut along the last dimension, as tensor parallelism does."""
    found = []
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if not shape:
            found += [TensorShard(key, shape, Region.whole(shape), tensor)] if rank == 0 else []
            continue
        begin, end = (shape[-1] * n // ranks for n in (rank, rank + 1))
        cut = Region((*[0] * (len(shape) - 1), begin), (*shape[:-1], end - begin))
        found.append(TensorShard(key, shape, cut, tensor[..., begin:end]))
    return found


WAYS: dict[str, Callable[[Mapping[str, Tensor], int, int], Sequence[TensorShard]]] = {
    "rows": rows,
    "stretches": stretches,
    "columns": columns,
}


def save(
    folder: Path,
    *steps: int,
    ranks: int = 2,
    run: str = "run",
    keep: int = 9,
    way: str = "rows",
    background: bool = True,
    file_size: int = 80,
    committed: Callable[[], None] = lambda: None,
) -> None:
    """Checkpoints of `state(step)` for each of the steps."""

    def act(rank: ThreadRank) -> None:
        saver = AsyncSaver(
            folder,
            rank,
            keep=keep,
            background=background,
            file_size=file_size,
            committed=committed,
        )
        for step in steps:
            pieces = WAYS[way](state(step), rank.rank, rank.size)
            saver.save(
                CheckpointIdentity(run, step, "ddp", "job"),
                pieces,
                {"taken": step},
                Progress(step, tokens=step),
            )
            saver.wait()

    together(ranks, act)
