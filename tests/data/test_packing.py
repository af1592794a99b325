"""Packing: every document once, no row too full, and as full as best fit decreasing gets them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtune.data.packing import pack, pack_in_order

CAPACITY = 64
some_lengths = st.lists(st.integers(1, CAPACITY), max_size=200).map(
    lambda values: np.array(values, dtype=np.int32)
)


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook's algorithm on bare lengths, quadratic and plain."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@given(some_lengths)
def test_every_document_stands_in_exactly_one_row(lengths):
    for rows in (pack(lengths, CAPACITY), pack_in_order(lengths, CAPACITY)):
        assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
        assert all(0 < lengths[row].sum() <= CAPACITY for row in rows)


@given(some_lengths)
def test_rows_are_as_full_as_those_of_best_fit_decreasing(lengths):
    # Compared by their sums: which of two rows with as much space is chosen is left open.
    ours = sorted(int(lengths[row].sum()) for row in pack(lengths, CAPACITY))
    assert ours == sorted(map(sum, best_fit_decreasing(lengths.tolist(), CAPACITY)))


@given(st.lists(st.sets(st.integers(1, CAPACITY - 1), max_size=12), min_size=1, max_size=30))
def test_packing_is_near_the_best_there_is(cuts):
    # Full rows cut at random places: the best packing is known to be one row for each. Best fit
    # decreasing never needs more than 11/9 of the best plus 6/9 (Dosa 2007).
    best = len(cuts)
    pieces = [np.diff([0, *sorted(row), CAPACITY]) for row in cuts]
    assert len(pack(np.concatenate(pieces), CAPACITY)) <= (11 * best + 6) / 9


@given(some_lengths, st.randoms(use_true_random=False))
def test_another_order_gives_as_many_rows(lengths, random):
    shuffled = list(range(len(lengths)))
    random.shuffle(shuffled)
    assert len(pack(lengths[shuffled], CAPACITY)) == len(pack(lengths, CAPACITY))


def test_equal_lengths_are_taken_in_the_given_order():
    # Enough of them for numpy's sort to leave the simple method that keeps order by itself.
    lengths = np.tile([3, 7], 500)
    sevens = [[n, n + 2] for n in range(1, 1000, 4)]
    threes = [[n, n + 2, n + 4, n + 6] for n in range(0, 1000, 8)]
    assert pack(lengths, 14) == sevens + threes


def test_a_document_goes_where_it_fits_most_tightly():
    # 5 leaves 3 free and 6 leaves 2 free: 2 fits both, and goes to the 6.
    assert pack(np.array([5, 6, 2]), 8) == [[1, 2], [0]]


def test_packing_in_order_opens_a_row_only_when_the_next_does_not_fit():
    # Worked out by hand; the 1 would fit the first row, but order is kept.
    assert pack_in_order(np.array([5, 3, 6, 1, 2, 8]), 8) == [[0, 1], [2, 3], [4], [5]]


def test_nothing_packs_to_nothing():
    nothing = np.array([], dtype=np.int32)
    assert pack(nothing, 8) == []
    assert pack_in_order(nothing, 8) == []


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("capacity", [2048, 131072])
def test_a_million_documents_take_seconds(capacity):
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 1_000_000).astype(np.int64) + 1
    lengths = np.minimum(lengths, capacity)
    begin = time.process_time()
    rows = pack(lengths, capacity)
    assert time.process_time() - begin < 10  # about one second on a laptop core
    assert lengths.sum() / (len(rows) * capacity) > 0.999
