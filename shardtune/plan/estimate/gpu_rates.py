"""What a GPU reaches of its data sheet: FLOP/s of products, bytes a second of all else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardtune.plan.cluster import Cluster
from shardtune.plan.estimate.constants import Chip, TimeConstants

GROUPED = 0.9
"""Of a large product's rate, what grouped products of experts reach: 650 TFLOP/s on an H200, with
1,024 to 2,048 rows of an expert. Their bytes pass meanwhile."""
COPY = 0.89
"""Of the data sheet's bandwidth, what a copy reaches: 4.26 of 4.8 TB/s on an H200."""


@dataclass(frozen=True)
class Busy:
    """Forward and backward seconds of one micro-batch."""

    forward: float
    backward: float

    def __add__(self, other: Busy) -> Busy:
        return Busy(self.forward + other.forward, self.backward + other.backward)

    @property
    def both(self) -> float:
        return self.forward + self.backward


IDLE = Busy(0.0, 0.0)


@dataclass(frozen=True)
class GpuRates:
    """What the GPU can do, as a training step sees it."""

    cluster: Cluster
    chip: Chip
    time: TimeConstants
    width: float = 2
    """Bytes of a number that is computed with."""

    @cached_property
    def peak(self) -> float:
        """FLOP/s by the data sheet. In fp32 what a GPU reaches of it is taken to be what it reaches
        in 16 bits: none of the published runs multiplies in fp32."""
        gpu = self.cluster.gpu
        in_fp32 = gpu.fp32_tflops if self.width == 4 else None
        return (in_fp32 or gpu.peak_tflops) * 1e12

    @cached_property
    def flops(self) -> float:
        """FLOP/s of a large product."""
        points = self.cluster.measured.matmul
        found = [point.tflops for point in points if point.dtype != "fp8"]
        if self.width == 4 and self.cluster.gpu.fp32_tflops is not None:
            found = [point.tflops for point in points if point.dtype == "fp32"]
        ceiling = max(found) * 1e12 if found else self.peak * self.chip.ceiling
        return ceiling * self.chip.matmul

    @cached_property
    def bytes(self) -> float:
        """Bytes a second that small operations pass over."""
        copied = self.cluster.measured.memory_gbs
        sheet = copied / COPY if copied else self.cluster.gpu.memory_gbs
        return sheet * 1e9 * self.chip.memory

    def product(
        self, m: float, n: float, k: float, *, faster: float = 1.0, operand: float | None = None
    ) -> float:
        """An m x k matrix times a k x n one: the arithmetic, then the way of its bytes. `faster` is
        against 16 bits, `operand` how many bytes a number has that goes in, if not as all.

        They overlap, but tiles have edges, and kernels a start and an end: over all shapes the sum
        is nearer to what is measured than the longer of the two.
        """
        speed = self.flops * faster
        if n % 8 or k % 8:
            speed *= self.time.unaligned
        read = (operand or self.width) * (n * k + m * k)
        return 2 * m * n * k / speed + (self.width * m * n + read) / self.bytes

    def grouped(self, m: float, n: float, k: float) -> float:
        """The same of one expert among many, whose products are one kernel."""
        passed = self.width * (m * n + n * k + m * k) / self.bytes
        return max(2 * m * n * k / (self.flops * GROUPED), passed)
