"""Sharing rows over ranks: nothing lost, everyone equally busy."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtune.data.micro_batches import micro_batches
from shardtune.data.sampler import DocumentRef, Sampler

some_rows = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), max_size=40).map(
    lambda rows: [
        tuple(DocumentRef(number, index, length) for index, length in enumerate(lengths))
        for number, lengths in enumerate(rows)
    ]
)
few = st.integers(1, 6)


def tokens(row):
    return sum(document.length for document in row)


def padded(batch):
    return len(batch) * max(map(tokens, batch), default=0)


@given(some_rows, few, few, st.integers(0, 9))
def test_every_row_goes_to_one_rank(rows, ranks, micro_batch, turn):
    shares = micro_batches(rows, ranks, micro_batch, turn=turn)
    dealt = [row for batches in shares for batch in batches for row in batch]
    assert len(shares) == ranks
    assert Counter(dealt) == Counter(rows)


@given(some_rows, few, few)
def test_all_ranks_have_as_many_micro_batches_of_nearly_one_size(rows, ranks, micro_batch):
    shares = micro_batches(rows, ranks, micro_batch)
    rounds = -(-len(rows) // (ranks * micro_batch))  # as few as can hold the rows
    assert [len(batches) for batches in shares] == [rounds] * ranks
    sizes = [len(batch) for batches in shares for batch in batches]
    assert max(sizes, default=0) <= micro_batch
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(some_rows, few, few)
def test_rows_of_like_length_share_a_micro_batch(rows, ranks, micro_batch):
    batches = [
        batch for batches in micro_batches(rows, ranks, micro_batch) for batch in batches if batch
    ]
    spans = sorted((min(map(tokens, batch)), max(map(tokens, batch))) for batch in batches)
    # Sorted by length and cut: no micro-batch reaches into another's range of lengths.
    assert all(low[1] <= high[0] for low, high in pairwise(spans))


@given(some_rows, few, few)
def test_the_largest_come_first_on_every_rank(rows, ranks, micro_batch):
    shares = micro_batches(rows, ranks, micro_batch)
    rounds = list(zip(*([padded(batch) for batch in batches] for batches in shares), strict=True))
    assert all(min(now) >= max(later) for now, later in pairwise(rounds))


@given(some_rows, few, few)
def test_sharing_is_deterministic(rows, ranks, micro_batch):
    assert micro_batches(rows, ranks, micro_batch) == micro_batches(list(rows), ranks, micro_batch)


def test_too_few_rows_leave_empty_micro_batches():
    rows = [(DocumentRef(0, index, 5),) for index in range(3)]
    assert sorted(map(len, (batches[0] for batches in micro_batches(rows, 4, 2)))) == [0, 1, 1, 1]


def test_the_rank_with_the_least_takes_the_largest_of_the_next_round():
    rows = [(DocumentRef(0, index, length),) for index, length in enumerate([1, 2, 3, 4])]
    lengths = [[batch[0][0].length for batch in batches] for batches in micro_batches(rows, 2, 1)]
    assert lengths == [[4, 1], [3, 2]]


def test_each_rank_has_its_turn_at_the_largest():
    rows = [(DocumentRef(0, index, length),) for index, length in enumerate([1, 2, 3])]
    takers = [micro_batches(rows, 3, 1, turn=turn).index([[rows[2]]]) for turn in range(6)]
    assert sorted(takers[:3]) == sorted(takers[3:]) == [0, 1, 2]


def run(*, packing, global_batch, ranks, micro_batch, steps=60):
    """The padded tokens of each step and rank, and those of rows batched as they come.

    On lengths like those of instruction sets.
    """
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(5.5, 0.8, 20_000).astype(np.int64) + 1, 2048)
    order = Sampler([lengths], ["a"], [1.0], capacity=2048, packing=packing, shuffle=True, seed=0,
                  global_batch=global_batch)  # fmt: skip
    costs, as_they_come = [], 0
    for step in range(steps):
        rows = order.rows(step)
        shares = micro_batches(rows, ranks, micro_batch, turn=step)
        costs.append([sum(map(padded, batches)) for batches in shares])
        firsts = range(0, global_batch, micro_batch)
        as_they_come += sum(padded(rows[first : first + micro_batch]) for first in firsts)
    return np.array(costs), as_they_come


@pytest.mark.parametrize(
    ("global_batch", "ranks", "micro_batch"), [(16, 2, 4), (64, 8, 2), (12, 3, 4)]
)
def test_packed_steps_keep_all_ranks_equally_busy(global_batch, ranks, micro_batch):
    costs, _ = run(packing=True, global_batch=global_batch, ranks=ranks, micro_batch=micro_batch)
    assert (costs.max(axis=1) / costs.mean(axis=1)).max() < 1.02  # in each single step


@pytest.mark.parametrize(
    ("global_batch", "ranks", "micro_batch"), [(64, 4, 4), (32, 2, 4), (128, 8, 4)]
)
def test_unpacked_runs_keep_all_ranks_equally_busy(global_batch, ranks, micro_batch):
    costs, as_they_come = run(packing=False, global_batch=global_batch, ranks=ranks,
                              micro_batch=micro_batch)  # fmt: skip
    totals = costs.sum(axis=0)
    assert totals.max() / totals.mean() < 1.03  # over the run; a single long row decides a step
    assert totals.sum() < 0.75 * as_they_come  # and far less padding than without sorting
