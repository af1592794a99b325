"""Joins this process to the others of its run.

Whoever started the processes, torchrun or `launch.local`, has set RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT; that is the whole interface.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from shardtune.core.world import World
from shardtune.launch import STARTED_BY_US

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass
class Interrupt:
    """A wish to stop, which the training loop looks at between two steps."""

    wished: bool = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks; the second doesn't ask."""
        if self.wished:
            os._exit(128 + number)
        self.wished = True


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

    def stop_wished(self) -> bool:
        """Whether any rank was asked to stop. All ranks get the same answer in the same step."""
        return self.any(self.interrupt.wished)

    def most(self, value: float) -> float:
        """The largest `value` of all ranks."""
        if self.size == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.item()

    def wait(self) -> None:
        """Returns when every rank has come here."""
        self.any(False)


@contextmanager
def join(threads: int) -> Iterator[JoinedWorld]:
    """This process's place in the world; the process group lives as long as the block."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    _die_with_parent()
    torch.set_num_threads(threads)
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(device)
    with _heeding_signals() as interrupt:
        if size > 1:
            backend = "cpu:gloo,cuda:nccl" if device != "cpu" else "gloo"
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        yield JoinedWorld(rank, size, local_rank, device, interrupt)
        # Only after a good end: a rank that fails has to say why before its peers notice that it
        # is gone, or their complaints would come first. The group ends with the process anyway.
        if size > 1:
            dist.destroy_process_group()


@contextmanager
def _heeding_signals() -> Iterator[Interrupt]:
    """SIGINT and SIGTERM become a wish, as long as the block lasts."""
    interrupt = Interrupt()
    # Our own launcher turns its SIGTERM into a SIGINT; a SIGTERM from it means: now.
    ours = STARTED_BY_US in os.environ
    numbers = (signal.SIGINT,) if ours else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, interrupt.on_signal) for number in numbers}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> None:
    """A launcher that is killed can't clean up; on Linux the kernel does it for us."""
    parent = os.environ.get(STARTED_BY_US)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        os._exit(1)
