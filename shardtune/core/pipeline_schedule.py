"""Pipelines as arithmetic: who has which layers, how long ranks wait, what they keep meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

PipelineKind = Literal["layers", "gpipe", "1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class Pipelining:
    """The order in which stages work on micro-batches.

    `layers` has one micro-batch in flight: the others wait. `gpipe` runs all forward passes, then
    all backward passes. `1f1b` alternates, and so keeps fewer micro-batches. `interleaved` gives
    every rank several stages. `zero_bubble` (the V-shaped schedule) also does the gradients of
    weights in the time that would be waited.
    """

    kind: PipelineKind
    chunks: int = 1
    """Stages of each rank; the V-shaped schedule has two."""

    def stages(self, ranks: int) -> int:
        return ranks * self.chunks

    def ranks(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage, in the order of the layers."""
        if self.kind == "zero_bubble":  # down and up again: the first rank has the last stage too
            return (*range(ranks), *reversed(range(ranks)))
        return tuple(stage % ranks for stage in range(ranks * self.chunks))

    def borders(self, ranks: int, rank: int) -> int:
        """Borders between stages over which a rank sends: activations one way, gradients back."""
        sides = pairwise(self.ranks(ranks))
        return sum((here == rank) + (there == rank) for here, there in sides if here != there)

    def runs(self, ranks: int, microbatches: int) -> int:
        """The micro-batches that really run: the interleaved order takes them in equal rounds.

        The last round is filled up with empty ones, which have no labels.
        """
        if self.kind == "interleaved":
            while microbatches % max(1, microbatches // ranks):
                microbatches += 1
        return microbatches

    def bubble(self, ranks: int, microbatches: int) -> float:
        """The time that a rank waits, as a share of the time that it works.

        Narayanan et al. 2021 (arXiv 2104.04473): (p - 1) / m, and a chunk's share of it with
        several stages a rank. One micro-batch in flight: the other p - 1 ranks' work, always.
        The V-shaped schedule leaves the time until the last rank's first stage can begin, half of
        a forward pass for each rank before it, which is a sixth of a micro-batch's work. With
        fewer than 2p - 1 micro-batches there is too little to do meanwhile.
        """
        if self.kind == "layers":
            return float(ranks - 1)
        if self.kind == "zero_bubble":
            return (ranks - 1) / (microbatches * (6 if microbatches >= 2 * ranks - 1 else 3))
        return (ranks - 1) / (microbatches * self.chunks)

    def utilisation(self, ranks: int, microbatches: int) -> float:
        """The share of its time that a rank works."""
        return 1 / (1 + self.bubble(ranks, microbatches))

    def in_flight(self, ranks: int, microbatches: int, rank: int) -> float:
        """The most micro-batches whose activations a rank keeps, counted in its whole part."""
        if self.kind == "layers":
            return 1.0
        if self.kind == "gpipe":
            return float(microbatches)
        if self.kind == "1f1b":
            return float(min(microbatches, ranks - rank))
        if self.kind == "zero_bubble":  # as much as 1f1b keeps on its first rank, on every one
            return float(min(microbatches, ranks))
        warmup = 2 * (ranks - rank - 1) + (self.chunks - 1) * ranks + 1
        return min(microbatches * self.chunks, warmup) / self.chunks


def stage_costs(layers: Sequence[float], head: float) -> list[float]:
    """What each layer costs where it stands: the last one has the head behind it.

    All are multiplications for one token, so a layer costs the size of its matrices and the head
    hidden width x vocabulary. The embedding in front of the first layer looks up a row: nothing.
    """
    return [*layers[:-1], layers[-1] + head]


def split_layers(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Consecutive parts in so many groups, the most expensive of which is as cheap as can be.

    Among equally good cuts it takes the one whose groups are most alike.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} parts can't make {stages} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def grown(begin: int, end: int) -> tuple[float, float, int]:
        """The largest group, the sum of squares, and where the last group begins."""
        worst, squares, _ = best[-1][begin]
        last = total[end] - total[begin]
        return max(worst, last), squares + last**2, begin

    best = [{0: (0.0, 0.0, 0)}]  # by the number of groups, then by where they end
    for group in range(1, stages + 1):
        ends = range(group, len(costs) - (stages - group) + 1)
        best.append({end: min(grown(b, end) for b in best[-1] if b < end) for end in ends})
    borders = [len(costs)]
    for group in range(stages, 0, -1):
        borders.insert(0, best[group][borders[0]][2])
    return tuple(range(begin, end) for begin, end in pairwise(borders))
