"""Measures this machine in about a minute: products, memory, copies, disk, and collectives.

Every rank calls `bench`. Rank 0 measures what concerns one device while the others wait; then all
of them send messages of growing size. The result is what `shardtune plan` reads.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shardtune.core.host.matmul_speed import cpu_matmul_speed, forced_matmul_speed, gpu_matmul_speed
from shardtune.core.setup import Precision
from shardtune.core.units import GIB
from shardtune.core.world import World
from shardtune.errors import JobError
from shardtune.kernels.measure_matmul import DTYPES, bf16_on_gpu, measure_cpu_matmul
from shardtune.plan.cluster import find_gpu
from shardtune.plan.machine_profile import CollectivePoint, GpuFacts, MatmulPoint, Measured, Profile

BenchOp = Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv"]
LARGEST_MESSAGE = {"cuda": GIB, "cpu": GIB // 16}
"""Bytes of the largest message."""
# Tokens x inputs x outputs of layers of 1 B to 70 B models, a square one, and an output head.
GPU_SHAPES = (
    (8192, 8192, 8192), (16384, 2048, 8192), (16384, 4096, 4096), (16384, 4096, 14336),
    (16384, 14336, 4096), (16384, 4096, 1024), (4096, 4096, 14336), (2048, 4096, 14336),
    (2048, 8192, 28672), (8192, 8192, 28672), (2048, 4096, 128256), (16384, 4096, 16),
)  # fmt: skip
CPU_SHAPES = ((1024, 1024, 1024), (2048, 576, 1536), (512, 2048, 2048), (256, 576, 49152))
SECONDS = 0.3  # spent on one figure
ROUNDS = 5
BURST, REST = 0.02, 0.1  # seconds that a GPU works, and rests, in a round


def bench(world: World, folder: Path, say: Callable[[str], None]) -> Profile:
    """The machine's profile; complete on rank 0 only. `folder` is on the disk to be measured."""
    device = torch.device(world.device)
    found: dict[str, Any] = {}
    if world.is_main:
        say("matmuls")
        found["matmul"] = tuple(matmuls(device))
        say("memory and copies")
        found["memory_gbs"] = memory_gbs(device)
        if device.type == "cuda":
            found["host_to_device_gbs"], found["device_to_host_gbs"] = copies_gbs(device)
        say("disk")
        found["disk_write_gbs"], found["disk_read_gbs"] = disk_gbs(folder)
    if world.size > 1:
        dist.barrier()
        if world.is_main:
            say(f"collectives on {world.size} ranks")
        found["collectives"] = tuple(collectives(world))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return Profile(
        gpu=_gpu(device, found.get("matmul", ()), found.get("memory_gbs")),
        nodes=max(1, world.size // local),
        gpus_per_node=local,
        host_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        measured=Measured(**found),
    )


def matmuls(device: torch.device) -> Iterator[MatmulPoint]:
    """The rate of each shape in the precision that training computes in by default."""
    precision = _precision(device)
    dtype = DTYPES[precision]
    for m, k, n in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        left = torch.randn(m, k, device=device).to(dtype)
        right = torch.randn(n, k, device=device).to(dtype).T  # as weights are stored
        seconds = timed(lambda a=left, b=right: a @ b, device)  # type: ignore[misc]
        yield MatmulPoint(m=m, n=n, k=k, dtype=precision, tflops=2 * m * n * k / seconds / 1e12)


def _precision(device: torch.device) -> Precision:
    gpu = device.type == "cuda"
    speed = forced_matmul_speed()
    if speed is None and gpu:
        speed = gpu_matmul_speed("this GPU", bf16=bf16_on_gpu())
    return (speed or cpu_matmul_speed(measure_cpu_matmul)).best(gpu=gpu)[0]


def memory_gbs(device: torch.device) -> float:
    """A copy inside the device: read and written."""
    size = GIB if device.type == "cuda" else GIB // 4
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device) / 1e9


def copies_gbs(device: torch.device) -> tuple[float, float]:
    """From pinned host memory to the device, and back."""
    host = torch.zeros(GIB // 2, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    out = timed(lambda: there.copy_(host, non_blocking=True), device)
    back = timed(lambda: host.copy_(there, non_blocking=True), device)
    return len(host) / out / 1e9, len(host) / back / 1e9


def disk_gbs(folder: Path) -> tuple[float, float]:
    """Written and synced, then read again without what the system still remembers of it."""
    piece, pieces = os.urandom(1 << 24), 16
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        begun = time.perf_counter()
        for _ in range(pieces):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - begun
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        while file.read(len(piece)):
            pass
        read = time.perf_counter() - begun
    size = len(piece) * pieces / 1e9
    return size / written, size / read


def collectives(world: World) -> Iterator[CollectivePoint]:
    """Every kind of message over sizes from 64 KiB up, each a factor of four larger."""
    device = torch.device(world.device)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    for op in get_args(BenchOp):
        size = 1 << 16
        while size <= LARGEST_MESSAGE[device.type]:
            seconds = _longest(timed(_message(op, size, world, device), device, group=True))
            yield CollectivePoint(
                op=op,
                link="intra_node" if local == world.size else "inter_node",
                ranks=2 if op == "send_recv" else world.size,
                bytes=size,
                seconds=seconds,
            )
            size *= 4


def _message(op: BenchOp, size: int, world: World, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(size // 4 // world.size * world.size, device=device)
    share = torch.zeros(len(whole) // world.size, device=device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if op == "all_gather":  # newer versions of torch have another name for it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(whole, share)
    if op == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter(share, whole)
    if world.rank == 0:
        return lambda: dist.send(whole, world.size - 1)
    if world.rank == world.size - 1:
        return lambda: dist.recv(whole, 0)
    return lambda: None


def timed(work: Callable[[], object], device: torch.device, *, group: bool = False) -> float:
    """Seconds of one piece of work: the median of several rounds.

    A round is as many pieces as take its time, without waiting in between: a GPU that is waited for
    after each of them stands still while the next is prepared, which training never lets it do.
    Rounds of a GPU are bursts: products without end bring it to its power limit and lower its clock
    (an H200 fell from 800 to 690 TFLOP/s), which a training step, with its pauses, doesn't.
    With `group` the number of pieces is agreed upon: every rank has to send as often.
    """

    def each(pieces: int) -> float:
        _synchronize(device)
        begun = time.perf_counter()
        for _ in range(pieces):
            work()
        _synchronize(device)
        return (time.perf_counter() - begun) / pieces

    each(1)  # which may compile, or choose a kernel
    first = _longest(each(1)) if group else each(1)
    gpu = device.type == "cuda"
    pieces = max(1, int((BURST if gpu else SECONDS / ROUNDS) / max(first, 1e-5)))
    rounds = []
    for _ in range(ROUNDS):
        time.sleep(REST if gpu else 0)
        rounds.append(each(pieces))
    return sorted(rounds)[ROUNDS // 2]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _longest(seconds: float) -> float:
    longest: Tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def _gpu(
    device: torch.device, points: tuple[MatmulPoint, ...], memory: float | None
) -> str | GpuFacts:
    """The catalogue's name of the device, or its own figures, so far as they were measured."""
    best = max((point.tflops for point in points), default=1.0)
    in_bf16 = best if all(point.dtype == "bf16" for point in points) else None
    if device.type != "cuda":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return GpuFacts(
            name="CPU", memory_gib=total, bf16_tflops=in_bf16, fp16_tflops=best,
            memory_gbs=memory or 1.0,
        )  # fmt: skip
    properties = torch.cuda.get_device_properties(device)
    total = properties.total_memory / GIB
    words = [word for word in properties.name.split() if word not in ("NVIDIA", "GeForce", "Tesla")]
    for name in (f"{''.join(words)}-{round(properties.total_memory / 1e9)}GB", "".join(words)):
        try:
            gpu = find_gpu(name)
        except JobError:
            continue
        if abs(gpu.memory_gib / total - 1) < 0.05:
            return gpu.name
    return GpuFacts(
        name=properties.name, memory_gib=total, bf16_tflops=in_bf16, fp16_tflops=best,
        memory_gbs=memory or 1.0,
    )  # fmt: skip
