"""Joins this process to the others of its run.

Whoever started the processes, our launcher, torchrun, Slurm or Ray, has set RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT; that is the whole interface.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from shardtune.core.heartbeat import Pulse, open_pulse
from shardtune.core.parent_death import die_with_parent
from shardtune.core.stop_request import Wish
from shardtune.core.world import World, outside_nodes
from shardtune.kernels.cpu_bf16 import widen_products
from shardtune.launch import PULSE, STARTED_BY_US
from shardtune.launch.process_info import answer_with_stack
from shardtune.launch.rendezvous import meet
from shardtune.launch.torch_env import torch_settings

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass
class Interrupt:
    """A wish to stop, which the training loop looks at between two steps."""

    wish: Wish = Wish.NONE
    once: bool = False
    """A second signal doesn't ask. Our launcher decides that itself, and would be misunderstood
    where a cluster sends the first one to every process."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks."""
        if self.wish and self.once:
            os._exit(128 + number)
        self.wish = max(self.wish, Wish.STOP if number == signal.SIGINT else Wish.LEAVE)


@dataclass(frozen=True)
class JoinedWorld(World):
    """A World whose ranks can talk to each other."""

    interrupt: Interrupt = field(default_factory=Interrupt, compare=False)

    def any(self, flag: bool) -> bool:
        """True on all ranks if `flag` is true on one of them."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def wish(self) -> Wish:
        """What any rank was asked to do. All ranks get the same answer in the same step."""
        return Wish(int(self.most(self.interrupt.wish)))

    def most(self, value: float) -> float:
        """The largest `value` of all ranks."""
        if self.size == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.item()

    def mean(self, values: Sequence[float]) -> list[float]:
        """Each of some values, on average over all ranks."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums / self.size).tolist()

    def gather(self, text: str) -> list[str]:
        """What each rank says, on all of them, by rank."""
        if self.size == 1:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        longest = int(max(lengths))
        padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, padded)
        said = zip(found, lengths, strict=True)
        return [each[: int(length) - 1].numpy().tobytes().decode() for each, length in said]

    def wait(self) -> None:
        """Returns when every rank has come here."""
        self.any(False)


@contextmanager
def join(threads: int) -> Iterator[JoinedWorld]:
    """This process's place in the world; the process group lives as long as the block."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if (launcher := os.environ.get(STARTED_BY_US)) is not None:
        die_with_parent(int(launcher))
    answer_with_stack()
    torch.set_num_threads(threads)
    widen_products()
    device = "cpu"
    if torch.cuda.is_available():
        # torch reads them with its first tensor. Our launcher has set them; others have not.
        os.environ.update(torch_settings(os.environ))
        # A cluster may show each rank one GPU only, or all of them.
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    with _heeding_signals() as interrupt:
        if size > 1:
            backend = "cpu:gloo,cuda:nccl" if device != "cpu" else "gloo"
            store = meet(rank, size, COLLECTIVE_TIMEOUT)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
            )
        yield JoinedWorld(
            rank=rank,
            size=size,
            local_rank=local_rank,
            device=device,
            pulse=_pulse(rank, size),
            nodes=outside_nodes(),
            interrupt=interrupt,
        )
        # Only after a good end: a rank that fails has to say why before its peers notice that it
        # is gone, or their complaints would come first. The group ends with the process anyway.
        if size > 1:
            dist.destroy_process_group()


@contextmanager
def _heeding_signals() -> Iterator[Interrupt]:
    """SIGINT and SIGTERM become a wish, as long as the block lasts."""
    interrupt = Interrupt(once=STARTED_BY_US not in os.environ)
    # Ray runs us in a thread, which can't heed signals; it has its own way to end a worker.
    ours = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if ours else ()
    before = {number: signal.signal(number, interrupt.on_signal) for number in numbers}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pulse(rank: int, size: int) -> Pulse:
    file = os.environ.get(PULSE)
    return Pulse() if file is None else open_pulse(int(file), rank, size)
