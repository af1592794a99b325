"""The process group: joins this process to the others of its run (rank, world size).

Whoever started the processes, our launcher, torchrun, Slurm or Ray, has set RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT; that is the whole interface.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from shardtune.core.host.heartbeat import Heartbeat, open_heartbeat
from shardtune.core.host.parent_death import die_with_parent
from shardtune.core.host.stop_request import StopRequest
from shardtune.core.world import World, outside_nodes
from shardtune.launch import HEARTBEAT_FD, INTERRUPTED, LAUNCHER_PID, PREEMPTED
from shardtune.launch.process_info import dump_stack_on_signal
from shardtune.launch.rendezvous import rendezvous
from shardtune.launch.torch_env import torch_environment

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass
class StopSignals:
    """Signals that asked this rank to stop; the training loop reads them between two steps."""

    request: StopRequest = StopRequest.NONE
    once: bool = False
    """A second signal doesn't ask. Our launcher decides that itself, and would be misunderstood
    where a cluster sends the first one to every process."""
    agreed: StopRequest = StopRequest.NONE
    """What all ranks have heeded, whichever of them was asked."""

    @property
    def exit_code(self) -> int:
        """Of a rank: one that was stopped isn't done."""
        codes = {StopRequest.STOP: INTERRUPTED, StopRequest.PREEMPT: PREEMPTED}
        return codes.get(self.agreed, 0)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks."""
        if self.request and self.once:
            os._exit(128 + number)
        asked = StopRequest.STOP if number == signal.SIGINT else StopRequest.PREEMPT
        self.request = max(self.request, asked)


@dataclass(frozen=True)
class JoinedWorld(World):
    """A World whose ranks can talk to each other."""

    stop_signals: StopSignals = field(default_factory=StopSignals, compare=False)

    def any(self, flag: bool) -> bool:
        """True on all ranks if `flag` is true on one of them."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def stop_request(self) -> StopRequest:
        """What any rank was asked to do. All ranks get the same answer in the same step."""
        agreed = StopRequest(int(self.max(self.stop_signals.request)))
        self.stop_signals.agreed = agreed
        return agreed

    def max(self, value: float) -> float:
        """The largest `value` of all ranks."""
        if self.size == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.item()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each rank, of which all have as many, on all of them."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return [each.tolist() for each in found]

    def all_gather(self, text: str) -> list[str]:
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

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.any(False)


@contextmanager
def join_process_group(
    threads: int, stop_signals: StopSignals | None = None
) -> Iterator[JoinedWorld]:
    """This process's place in the world; the process group lives as long as the block. Signals that
    ask this rank to stop are noted in `stop_signals`."""
    stop_signals = stop_signals or StopSignals()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if (launcher := os.environ.get(LAUNCHER_PID)) is not None:
        die_with_parent(int(launcher))
    dump_stack_on_signal()
    torch.set_num_threads(threads)
    device = "cpu"
    if torch.cuda.is_available():
        # torch reads them with its first tensor. Our launcher has set them; others have not.
        os.environ.update(torch_environment(os.environ))
        # A cluster may show each rank one GPU only, or all of them.
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    found_group = dist.is_initialized()
    with _heeding(stop_signals):
        if size > 1:
            backend = "cpu:gloo,cuda:nccl" if device != "cpu" else "gloo"
            store = rendezvous(rank, size, COLLECTIVE_TIMEOUT)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
            )
        failed = True
        try:
            yield JoinedWorld(
                rank=rank,
                size=size,
                local_rank=local_rank,
                device=device,
                heartbeat=_heartbeat(rank, size),
                nodes=outside_nodes(),
                stop_signals=stop_signals,
            )
            failed = False
        finally:
            # A rank that fails has to say why before its peers notice that it is gone, or their
            # complaints would come first: its group ends with the process. One that is alone has a
            # group if its engine needs one, which the next run of this process shall not find.
            if dist.is_initialized() and not found_group and not (failed and size > 1):
                with suppress(RuntimeError) if failed else nullcontext():  # the first error counts
                    dist.destroy_process_group()


@contextmanager
def _heeding(stop_signals: StopSignals) -> Iterator[None]:
    """SIGINT and SIGTERM become a stop request, as long as the block lasts."""
    stop_signals.once = LAUNCHER_PID not in os.environ
    # Ray runs us in a thread, which can't heed signals; it has its own way to end a worker.
    ours = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if ours else ()
    before = {number: signal.signal(number, stop_signals.on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heartbeat(rank: int, size: int) -> Heartbeat:
    file = os.environ.get(HEARTBEAT_FD)
    return Heartbeat() if file is None else open_heartbeat(int(file), rank, size)
