"""Layer times of a source that contradict one another, found without asking the planner.

A file of iteration times is made of a few layer times: one for each hidden size, degree of tensor
parallelism and number of rows. A layer that has at least as much of everything as another (as many
slices, no fewer rows, no smaller hidden size) can't take less time but by what a clock and a host
scatter. Where it takes much less, one of the two measurements can't be met by any forecast in which
more work takes no less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cases import Case
from shardtune.plan.estimate.compute import SOFTMAX_BATCH

SCATTER = 0.1
"""A layer with more work may take less by up to this: hosts and clocks of two runs differ."""


@dataclass(frozen=True, order=True)
class LayerKind:
    """What a layer time of the file depends on."""

    tensor: int
    hidden: int
    rows: int

    def has_all_of(self, other: LayerKind) -> bool:
        """Whether it has at least as much work as another in as many slices."""
        return self.tensor == other.tensor and (
            self.hidden >= other.hidden and self.rows >= other.rows and self != other
        )


@dataclass(frozen=True)
class Contradiction:
    """A layer's seconds, beside those of one that has no more work and takes longer."""

    took: float
    smaller: LayerKind
    longer: float


def kind_of(case: Case) -> LayerKind:
    return LayerKind(case.mesh.size_of("tensor"), case.shape.hidden, case.work.micro_batch)


def layer_times(cases: Iterable[Case]) -> dict[LayerKind, float]:
    """Seconds of a layer by its kind: how much a step grows with layers times micro-batches, in
    runs that are divided into slices alone."""
    groups: dict[LayerKind, list[Case]] = {}
    for case in cases:
        sliced = case.mesh.size_of("tensor")
        if case.measured is not None and case.mesh.size == sliced > 1:
            groups.setdefault(kind_of(case), []).append(case)
    return {kind: _slope(mine) for kind, mine in groups.items()}


def _slope(cases: Sequence[Case]) -> float:
    """Of time over layers: what comes once a micro-batch, and once a step, is set apart."""
    micro = np.array([case.work.microbatches for case in cases], dtype=float)
    layers = np.array([case.shape.layers for case in cases], dtype=float)
    unknown = np.stack([layers * micro, micro, np.ones_like(micro)], axis=1)
    found, *_ = np.linalg.lstsq(unknown, np.array([case.measured for case in cases]), rcond=None)
    return float(found[0])


def contradictory(cases: Iterable[Case]) -> dict[LayerKind, Contradiction]:
    """Layers that take less than one with no more work, by more than scatter. Those that a softmax
    in single steps slows down, for which there is a reason, contradict nothing."""
    mine = list(cases)
    times = layer_times(mine)
    in_steps = {kind_of(case) for case in mine if not fuses_softmax(case)}
    found = {}
    for kind, took in times.items():
        smaller = [each for each in times if kind.has_all_of(each) and each not in in_steps]
        slowest = max(smaller, key=times.__getitem__, default=None)
        if slowest is not None and took < (1 - SCATTER) * times[slowest]:
            found[kind] = Contradiction(took, slowest, times[slowest])
    return dict(sorted(found.items()))


def fuses_softmax(case: Case) -> bool:
    """Whether a slice has as many matrices of scores as Megatron's softmax kernel takes."""
    matrices = case.work.micro_batch * case.shape.heads // case.mesh.size_of("tensor")
    return matrices % SOFTMAX_BATCH == 0
