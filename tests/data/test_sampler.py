"""The order of samples: a pure function of the seed, the epoch and the step."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtune.data.sampler import DocumentRef, Sampler
from shardtune.errors import DataError

CAPACITY = 32


def lengths_of(sizes):
    random = np.random.default_rng(7)
    return [random.integers(1, CAPACITY + 1, size) for size in sizes]


def make(
    sizes, weights=None, *, packing=True, shuffle=True, seed=0, global_batch=4, earlier_ends=()
):
    """An order over data sets of so many documents, of 1 to 32 tokens each."""
    return Sampler(
        lengths_of(sizes),
        [f"set{number}" for number in range(len(sizes))],
        weights or [1.0] * len(sizes),
        capacity=CAPACITY,
        packing=packing,
        shuffle=shuffle,
        seed=seed,
        global_batch=global_batch,
        earlier_ends=earlier_ends,
    )


def documents(order, epochs, since=0):
    """The (data set, index) pairs of the epochs from `since` on, in order."""
    last = order.count(since + epochs)
    rows = chain.from_iterable(
        order.rows(step, last) for step in range(order.steps(since + epochs))
    )
    skipped = list(rows)[order.count(since) :]
    return [(document.dataset, document.index) for row in skipped for document in row]


orders = st.builds(
    make,
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    packing=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64),
    global_batch=st.integers(1, 9),
)


@given(orders)
def test_each_document_is_seen_once_in_each_epoch(order):
    first = Counter(documents(order, 1))
    assert set(first.values()) == {1}
    assert Counter(documents(order, 1, since=1)) == first
    assert len(documents(order, 3)) == 3 * len(first)


@given(orders, st.permutations(range(12)))
def test_any_step_can_be_asked_for_at_any_time(order, steps):
    in_order = {step: order.rows(step) for step in sorted(steps)}
    assert {step: order.rows(step) for step in steps} == in_order


@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.7])),
             min_size=1, max_size=3).filter(lambda sets: sum(n * w for n, w in sets) >= 1),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_weights_decide_how_often_each_document_is_seen(sets, packing, shuffle):
    sizes, weights = zip(*sets, strict=True)
    order = make(sizes, weights, packing=packing, shuffle=shuffle)
    seen = Counter(documents(order, 20))  # all these weights are whole twentieths
    for dataset, (size, weight) in enumerate(sets):
        times = [seen[dataset, index] for index in range(size)]
        assert sum(times) == round(weight * 20) * size
        assert max(times) - min(times) <= 1  # every document equally often, as far as it goes


def test_a_half_weight_takes_the_other_half_the_next_time():
    order = make([11, 4], [0.5, 1.0])
    first, second = documents(order, 1), documents(order, 1, since=1)
    assert [len(first), len(second)] == [5 + 4, 6 + 4]  # floor(5.5), then floor(11) - 5
    assert {d for d in first if d[0] == 0}.isdisjoint(second)


def test_halves_are_drawn_anew_each_time_around():
    order = make([40], [0.5])
    halves = [set(documents(order, 1, since=epoch)) for epoch in range(4)]
    assert halves[0] | halves[1] == halves[2] | halves[3] == {(0, index) for index in range(40)}
    assert halves[2] not in halves[:2]


def test_a_weight_means_the_decimal_that_was_written():
    # The float 0.7 is a little less than seven tenths: of 10 documents it would take 6.
    order = make([10], [0.7], packing=False)
    assert [len(documents(order, 1, since=epoch)) for epoch in range(10)] == [7] * 10
    assert set(Counter(documents(order, 10)).values()) == {7}


@pytest.mark.parametrize("packing", [True, False])
def test_another_epoch_or_seed_is_another_order(packing):
    order = make([50], packing=packing)
    assert documents(order, 1) != documents(order, 1, since=1)
    assert documents(order, 1) == documents(make([50], packing=packing), 1)
    assert documents(order, 1) != documents(make([50], packing=packing, seed=1), 1)


def test_two_sets_of_one_size_are_shuffled_differently():
    order = make([40, 40], packing=False)
    first, second = ([i for d, i in documents(order, 1) if d == dataset] for dataset in (0, 1))
    assert first != second


def test_data_sets_are_mixed():
    sets = [dataset for dataset, _ in documents(make([200, 200], packing=False), 1)]
    # 100 of the first 200 on average, with a standard deviation of 5.
    assert 70 <= sum(sets[:200]) <= 130


def test_packed_rows_are_shuffled_too():
    lengths = np.arange(1, 33).repeat(4)
    order = Sampler([lengths], ["a"], [1.0], capacity=CAPACITY, packing=True, shuffle=True, seed=0,
                  global_batch=1000)  # fmt: skip
    counts = [len(row) for row in order.rows(0, order.count(1))]
    assert counts != sorted(counts)  # packing alone puts the rows of one document first


@pytest.mark.parametrize("packing", [True, False])
def test_without_shuffling_the_files_order_is_kept(packing):
    order = make([9, 5], [1.0, 2.0], packing=packing, shuffle=False)
    files = [(0, i) for i in range(9)] + [(1, i) for i in range(5)] * 2
    assert documents(order, 2) == files * 2


def test_no_row_is_over_capacity_and_lengths_are_the_documents_own():
    lengths = lengths_of([30, 20])
    for row in make([30, 20], global_batch=20).rows(0):
        assert sum(document.length for document in row) <= CAPACITY
        assert all(lengths[each.dataset][each.index] == each.length for each in row)


def test_steps_cross_the_epochs_border():
    order = make([10], packing=False, global_batch=4)
    assert len(order.rows(2)) == 4
    taken = [document.index for step in range(5) for row in order.rows(step) for document in row]
    assert sorted(taken) == sorted([*range(10)] * 2)  # 5 steps of 4 rows are two epochs of 10


def test_a_step_can_be_larger_than_an_epoch():
    order = make([3], packing=False, global_batch=10)
    steps = [[row[0].index for row in order.rows(step)] for step in range(3)]
    assert [len(step) for step in steps] == [10, 10, 10]
    assert Counter(chain(*steps)) == {0: 10, 1: 10, 2: 10}  # 30 rows are ten epochs of 3


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"),
    [(1, 10, 3), (0.5, 5, 2), (2.0, 20, 5), (1.25, 13, 4), (0.01, 1, 1)],
)
def test_epochs_in_rows_and_steps(epochs, rows, steps):
    # 10 rows an epoch, 4 a step; a part of a row counts as a row.
    order = make([10], packing=False, global_batch=4)
    assert (order.count(epochs), order.steps(epochs)) == (rows, steps)
    assert sum(len(order.rows(step, rows)) for step in range(steps)) == rows
    assert all(order.rows(step, rows) for step in range(steps))


def test_progress_in_epochs():
    order = make([10], packing=False, global_batch=4)
    assert [order.epoch(step) for step in range(4)] == pytest.approx([0, 0.4, 0.8, 1.2])


def test_rows_of_earlier_epochs_are_counted_when_they_differ():
    # Fractional weights: epochs differ in their documents, and so in their number of rows.
    weights = [0.37, 1.0]
    order = make([40, 15], weights, global_batch=1)
    one_by_one = [order.rows(row)[0] for row in range(order.count(7))]
    jumped = make([40, 15], weights, global_batch=1)
    assert jumped.rows(len(one_by_one) - 1)[0] == one_by_one[-1]
    counts = {order.count(epoch + 1) - order.count(epoch) for epoch in range(7)}
    assert len(counts) > 1


def test_the_order_is_the_same_in_all_versions():
    # Written down when it was first made. If it changes, a resumed run repeats and skips rows.
    order = make([12], packing=False)
    assert [index for _, index in documents(order, 1)] == [0, 7, 6, 10, 2, 9, 5, 4, 3, 11, 1, 8]


def test_threads_see_the_same_rows():
    alone = make([60, 20], [0.7, 1.3])
    expected = [alone.rows(step) for step in range(30)]
    shared = make([60, 20], [0.7, 1.3])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(shared.rows, range(30))) == expected


def test_fill_is_the_share_of_tokens_in_the_rows():
    order = Sampler([np.array([8, 8, 8])], ["a"], [1.0], capacity=16, packing=True, shuffle=True,
                  seed=0, global_batch=1)  # fmt: skip
    assert order.fill() == 24 / 32
    assert order.rows(0)[0][0] == DocumentRef(0, order.rows(0)[0][0].index, 8)


def test_documents_that_fit_no_row_are_named():
    one = {"capacity": 16, "packing": True, "shuffle": True, "seed": 0, "global_batch": 1}
    with pytest.raises(DataError) as caught:
        Sampler([np.array([8, 17, 0])], ["a"], [1.0], **one)
    assert [problem.place for problem in caught.value.problems] == ["a:1", "a:2"]


@pytest.mark.parametrize(("sizes", "weights"), [([0], [1.0]), ([5, 4], [0.1, 0.1])])
def test_an_epoch_without_a_document_is_refused(sizes, weights):
    with pytest.raises(DataError, match="less than one"):
        make(sizes, weights)


def numbers(order, epochs):
    """The rows of each step of so many epochs, of a data set that is gone through in order."""
    last = order.count(epochs)
    steps = (order.rows(step, last) for step in range(order.steps(epochs)))
    return [[document.index for (document,) in rows] for rows in steps]


def test_an_extended_run_leaves_no_row_out():
    """Its steps are those that it has taken, and then the rows that it hasn't."""
    plain = {"packing": False, "shuffle": False}
    once = numbers(make([10], **plain), 1)
    assert once == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    order = make([10], earlier_ends=[1.0], **plain)
    second = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert numbers(order, 2) == once + second
    assert [order.epoch(step) for step in range(5)] == [0.0, 0.4, 0.8, 1.0, 1.4]
    assert order.epoch(6, order.count(2)) == 2.0
    again = make([10], earlier_ends=[1.0, 2.0], **plain)
    assert numbers(again, 2.5) == [*once, *second, [0, 1, 2, 3], [4]]
    assert [document.index for (document,) in again.rows(7)] == [4, 5, 6, 7], "of a run by steps"


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 9),
    st.lists(st.integers(1, 30), max_size=3),
)
def test_each_row_is_trained_once_wherever_a_run_had_ended(sizes, packing, global_batch, tenths):
    ends = [sum(tenths[: count + 1]) / 10 for count in range(len(tenths))]
    runs = []
    for earlier in ([], ends):
        order = make(sizes, packing=packing, global_batch=global_batch, earlier_ends=earlier)
        last = order.count(10)
        runs.append([order.rows(step, last) for step in range(order.steps(10))])
    whole, extended = runs
    assert all(extended)
    assert list(chain.from_iterable(extended)) == list(chain.from_iterable(whole))
