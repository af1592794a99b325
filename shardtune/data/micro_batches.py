"""Micro-batches: which rank computes which rows of a step, and gradient accumulation over them.

The micro-batches of all ranks together are the step's rows, each once. How they are divided
changes the time that a step takes and nothing else, because the loss is normalised by the whole
step's labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardtune.data.sampler import BatchRow


def micro_batches(
    rows: Sequence[BatchRow], ranks: int, micro_batch: int, *, turn: int = 0
) -> list[list[list[BatchRow]]]:
    """Deals rows to ranks: the result is indexed by rank, then micro-batch, then row.

    Every rank gets as many micro-batches as the others, because they compute them in lockstep;
    where there are fewer rows than places, some micro-batches are empty. Rows of like length share
    a micro-batch (little padding), and the ranks' n-th micro-batches are alike in size (little
    waiting). The largest come first, so that a step which doesn't fit in memory fails at once.
    `turn` (the step) decides who is served first, so that it isn't always the same rank that gets
    the largest.
    """
    rounds = -(-len(rows) // (ranks * micro_batch))
    batches = sorted(_cut(rows, ranks * rounds), key=_cost, reverse=True)
    shares: list[list[list[BatchRow]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for first in range(0, len(batches), ranks):
        # The rank that has got the least so far takes the largest of this round.
        queue = sorted(range(ranks), key=lambda rank: (loads[rank], (rank + turn) % ranks))
        for rank, batch in zip(queue, batches[first : first + ranks], strict=True):
            shares[rank].append(batch)
            loads[rank] += _cost(batch)
    return shares


def _cut(rows: Sequence[BatchRow], parts: int) -> list[list[BatchRow]]:
    """Cut the rows, sorted by length, into parts whose sizes differ by at most one.

    The larger parts hold the shorter rows: they are the ones that can take another at little cost.
    """
    ordered = sorted(rows, key=_tokens)
    size, larger = divmod(len(ordered), max(parts, 1))
    borders = [part * size + min(part, larger) for part in range(parts + 1)]
    return [ordered[begin:end] for begin, end in pairwise(borders)]


def _cost(batch: Sequence[BatchRow]) -> int:
    """The tokens that a micro-batch computes, padding included."""
    return len(batch) * max(map(_tokens, batch), default=0)


def _tokens(row: BatchRow) -> int:
    return sum(document.length for document in row)
