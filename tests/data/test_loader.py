"""The loader: what each rank is given, as tensors."""

from __future__ import annotations

import threading
import time
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtune.config.job import DataSection, Source, TrainSource
from shardtune.core.step import IGNORED
from shardtune.data.dataset import PreparedData, PreparedSet, SourceReport
from shardtune.data.loader import Loader
from shardtune.data.sampler import DocumentRef

LENGTH = 32
PAD = 0


def prepared(name, documents, weight=1.0):
    """A data set of (tokens, trained) pairs."""
    columns = {
        "input_ids": [tokens for tokens, _ in documents],
        "trained": [trained for _, trained in documents],
    }
    features = datasets.Features(
        input_ids=datasets.List(datasets.Value("int32")),
        trained=datasets.List(datasets.Value("bool")),
    )
    counts = np.array([len(tokens) for tokens, _ in documents], dtype=np.int32)
    labels = np.array([sum(trained) for _, trained in documents], dtype=np.int32)
    report = SourceReport(
        name=name, path=f"{name}.jsonl", format="completion", rows_read=len(documents),
        documents=len(documents), tokens=int(counts.sum()), labels=int(labels.sum()), truncated=0,
        truncated_tokens=0, split=0, dropped=0, untrained=0, bad=0, stops_trained=len(documents),
    )  # fmt: skip
    rows = datasets.Dataset.from_dict(columns, features=features)
    return PreparedSet(
        name=name, weight=weight, rows=rows, lengths=counts, labels=labels, report=report
    )


def some_documents(count, seed):
    """Documents of 2 to 32 tokens, of which any may be trained but the first."""
    random = np.random.default_rng(seed)
    sizes = random.integers(2, LENGTH + 1, count)
    return [
        (random.integers(1, 100, size).tolist(), [False, *(random.random(size - 1) < 0.5).tolist()])
        for size in sizes
    ]


CODE, CHAT, HELD_OUT = some_documents(23, 1), some_documents(14, 2), some_documents(17, 3)
DATA = PreparedData(
    train=(prepared("code", CODE), prepared("chat", CHAT, weight=0.5)),
    eval=(prepared("other", CODE), prepared("held-out", HELD_OUT)),
)


def section(**changes):
    source = TrainSource(path="code.jsonl", format="completion")
    held_out = Source(path="held.jsonl", format="completion")
    settings = {"sequence_length": LENGTH, **changes}
    return DataSection(train=(source,), eval=(held_out,), **settings)


def loader(data=DATA, *, rank=0, ranks=1, micro_batch=2, global_batch=6, epochs=None, **changes):
    return Loader(data, section(**changes), seed=3, global_batch=global_batch, rank=rank,
                  ranks=ranks, micro_batch=micro_batch, pad_id=PAD, epochs=epochs)  # fmt: skip


def all_ranks(ranks, **settings):
    return [loader(rank=rank, ranks=ranks, **settings) for rank in range(ranks)]


def train_rows(*rows):
    """Rows of documents of the set `code`, by their numbers."""
    return [tuple(DocumentRef(0, index, len(CODE[index][0])) for index in row) for row in rows]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_samples_of_every_step_are_the_same_for_any_number_of_ranks(packing, micro_batch):
    steps = 9  # more than one epoch
    alone = loader(packing=packing)
    expected = [alone.samples(step) for step in range(steps)]
    for ranks in (1, 2, 3, 4, 5, 8):
        group = all_ranks(ranks, micro_batch=micro_batch, packing=packing)
        runs = [list(each.steps(0, steps)) for each in group]
        for step in range(steps):
            assert all(each.samples(step) == expected[step] for each in group)
            given = [sample for run in runs for batch in run[step] for sample in batch.samples]
            assert Counter(given) == Counter(expected[step])
            assert len({len(run[step]) for run in runs}) == 1


def test_labels_and_tokens_of_a_step_do_not_depend_on_the_ranks():
    def totals(ranks):
        runs = [each.steps(0, 4) for each in all_ranks(ranks)]
        steps = zip(*runs, strict=True)
        batches = ([batch for mine in step for batch in mine] for step in steps)
        return [(sum(b.tokens for b in step), sum(b.labels for b in step)) for step in batches]

    assert totals(1) == totals(3) == totals(4)


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_has_each_document_once(packing):
    data = PreparedData(train=(DATA.train[0],), eval=())
    each = loader(data, packing=packing, epochs=1)
    steps = each.total_steps(1)
    seen = [s for step in each.steps(0, steps) for batch in step for s in batch.samples]
    assert sorted(seen) == sorted(f"code:{index}" for index in range(len(CODE)))
    assert Counter(s for step in range(steps) for s in each.samples(step)) == Counter(seen)


def test_without_an_end_the_last_step_is_filled_from_the_next_epoch():
    data = PreparedData(train=(DATA.train[0],), eval=())
    last = loader(data, packing=False).total_steps(1) - 1  # 23 rows, 6 a step
    assert len(loader(data, packing=False).samples(last)) == 6
    assert len(loader(data, packing=False, epochs=1).samples(last)) == 5


def test_the_longest_row_is_not_always_for_the_same_rank():
    group = all_ranks(3, global_batch=3, micro_batch=1, packing=False)
    runs = [[batch.tokens for (batch,) in each.steps(0, 12)] for each in group]
    heaviest = [tokens.index(max(tokens)) for tokens in zip(*runs, strict=True)]
    assert set(heaviest) == {0, 1, 2}


def test_steps_can_begin_anywhere():
    each = loader(ranks=2)
    onward = list(each.steps(0, 7))[4:]
    for resumed, through in zip(each.steps(4, 7), onward, strict=True):
        assert [batch.samples for batch in resumed] == [batch.samples for batch in through]
        for one, other in zip(resumed, through, strict=True):
            assert torch.equal(one.input_ids, other.input_ids)


def test_without_shuffling_documents_come_in_the_files_order():
    each = loader(packing=False, shuffle=False)
    assert each.samples(0) == tuple(f"code:{index}" for index in range(6))


def reference(rows, width):
    """What collation should give, token by token and straight from the contract."""
    ids = [[PAD] * width for _ in rows]
    positions, targets = [], [[IGNORED] * width for _ in rows]
    for number, row in enumerate(rows):
        at, counted = 0, []
        for document in row:
            tokens, trained = CODE[document.index]
            for t, token in enumerate(tokens):
                ids[number][at + t] = token
                if t + 1 < len(tokens) and trained[t + 1]:
                    targets[number][at + t] = tokens[t + 1]
            counted += range(len(tokens))
            at += len(tokens)
        while len(counted) < width:
            counted.append(counted[-1] + 1)
        positions.append(counted)
    return ids, positions, targets


@given(
    st.lists(
        st.lists(st.integers(0, len(CODE) - 1), min_size=1, max_size=3), min_size=1, max_size=5
    )
)
def test_collation_is_what_the_contract_says(numbers):
    rows = train_rows(*numbers)
    rows = [row for row in rows if sum(document.length for document in row) <= LENGTH]
    if not rows:
        return
    longest = max(sum(document.length for document in row) for row in rows)
    width = min((longest + 7) // 8 * 8, LENGTH)
    batch = loader().collate(rows)
    ids, positions, targets = reference(rows, width)
    assert batch.input_ids.tolist() == ids
    assert batch.position_ids.tolist() == positions
    assert batch.targets.tolist() == targets
    assert batch.tokens == sum(document.length for row in rows for document in row)
    assert batch.labels == (batch.targets != IGNORED).sum()
    assert batch.samples == tuple(f"code:{document.index}" for row in rows for document in row)
    tensors = (batch.input_ids, batch.position_ids, batch.targets)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_documents_of_several_sets_share_a_row():
    row = (DocumentRef(1, 3, len(CHAT[3][0])), DocumentRef(0, 2, len(CODE[2][0])))
    batch = loader(data=DATA).collate([row[:1], row[1:]])
    first, second = batch.input_ids.tolist()
    assert first[: row[0].length] == CHAT[3][0]
    assert second[: row[1].length] == CODE[2][0]
    assert batch.samples == ("chat:3", "code:2")


def test_a_row_of_one_document_counts_up_through_its_padding():
    batch = loader().collate(train_rows([0], [1]))
    width = batch.input_ids.shape[1]
    assert batch.position_ids.tolist() == [list(range(width))] * 2


def test_rows_are_never_wider_than_the_sequence():
    data = PreparedData(train=(prepared("odd", [([5] * 13, [False] + [True] * 12)]),), eval=())
    assert loader(data, sequence_length=13).collate([(DocumentRef(0, 0, 13),)]).input_ids.shape == (
        1,
        13,
    )


def test_a_rank_without_rows_gets_padding_that_trains_nothing():
    batch = loader().collate([])
    assert batch.input_ids.shape == (1, 8)
    assert (batch.input_ids == PAD).all()
    assert (batch.targets == IGNORED).all()
    assert batch.position_ids.tolist() == [list(range(8))]
    assert (batch.samples, batch.tokens, batch.labels) == ((), 0, 0)


def test_a_first_token_that_is_trained_is_refused():
    data = PreparedData(train=(prepared("bad", [([1, 2], [True, True])]),), eval=())
    with pytest.raises(AssertionError, match="first token"):
        loader(data).collate([(DocumentRef(0, 0, 2),)])


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_evaluation_sees_each_document_once(packing, ranks):
    shares = [list(each.evaluation("held-out")) for each in all_ranks(ranks, packing=packing)]
    seen = Counter(sample for mine in shares for batch in mine for sample in batch.samples)
    assert seen == {f"held-out:{index}": 1 for index in range(len(HELD_OUT))}
    assert len({len(mine) for mine in shares}) == 1
    labels = sum(batch.labels for mine in shares for batch in mine)
    assert labels == sum(sum(trained) for _, trained in HELD_OUT)


def test_evaluation_reads_the_set_of_that_name():
    (batch,) = loader(micro_batch=100, packing=False).evaluation("held-out")
    tokens = dict(zip(batch.samples, batch.input_ids.tolist(), strict=True))
    expected, _ = HELD_OUT[4]
    assert tokens["held-out:4"][: len(expected)] == expected


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_the_thread_ends_with_the_iterator():
    finished = loader().steps(0, 5)
    next(finished)
    assert loader_threads()
    list(finished)
    assert not loader_threads()

    closed = loader().steps(0, 1_000_000)
    next(closed)
    closed.close()
    assert not loader_threads()


def test_steps_lie_ready_before_they_are_asked_for(monkeypatch):
    each, made = loader(), []
    make = each._step
    monkeypatch.setattr(each, "_step", lambda step: made.append(step) or make(step))
    steps = each.steps(0, 100)
    next(steps)
    deadline = time.monotonic() + 10
    while made != [0, 1, 2] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made == [0, 1, 2]  # this one and two more, not the whole run
    steps.close()


def test_an_error_in_the_thread_reaches_the_consumer():
    rows = DATA.train[0].rows.select(range(5))  # the lengths promise documents that aren't there
    broken = PreparedSet(name="code", weight=1.0, rows=rows, lengths=DATA.train[0].lengths,
                      labels=DATA.train[0].labels, report=DATA.train[0].report)  # fmt: skip
    with pytest.raises(IndexError):
        list(loader(PreparedData(train=(broken,), eval=())).steps(0, 5))
    assert not loader_threads()


def test_steps_are_staged_by_the_thread_before_they_are_asked_for():
    staged = []

    def stage(batches):
        staged.append((threading.current_thread().name, batches))
        return batches[::-1]

    (first, *_) = steps = list(loader().steps(0, 4, stage))
    assert [batches[::-1] for _, batches in staged] == steps
    assert len(first) == 3
    assert all(name.startswith("loader") for name, _ in staged)


def test_a_selection_of_rows_is_read_through():
    # `select` leaves the Arrow file as it is and keeps a list of indices beside it.
    turned = prepared("code", CODE[::-1])
    rows = turned.rows.select(range(len(CODE) - 1, -1, -1))
    through = PreparedSet(name="code", weight=1.0, rows=rows, lengths=DATA.train[0].lengths,
                       labels=DATA.train[0].labels, report=DATA.train[0].report)  # fmt: skip
    batch = loader(PreparedData(train=(through,), eval=())).collate(train_rows([4]))
    assert batch.input_ids[0, : len(CODE[4][0])].tolist() == CODE[4][0]


def test_progress_and_fill():
    each = loader(packing=False)
    assert each.epoch(0) == 0
    assert each.epoch(5) == pytest.approx(30 / (23 + 7))  # 23 documents and half of 14
    assert 0.9 < loader().fill() <= 1 > each.fill()
    assert 0 < each.padding_share(100) < 1
    (batches,) = each.steps(0, 1)
    computed = sum(batch.input_ids.numel() for batch in batches)
    real = sum(batch.tokens for batch in batches)
    assert each.padding_share(1) == pytest.approx(1 - real / computed)


def test_collation_is_fast():
    random = np.random.default_rng(0)
    documents = [
        (random.integers(1, 100, 200).tolist(), [False] + [True] * 199) for _ in range(500)
    ]
    data = PreparedData(train=(prepared("big", documents),), eval=())
    big = loader(data, sequence_length=2048, global_batch=8, micro_batch=8)
    begin = time.process_time()
    rows = sum(len(batch.input_ids) for step in big.steps(0, 20) for batch in step)
    assert (time.process_time() - begin) / rows < 0.005  # measured: about 0.1 ms a row of 2048


def test_examples_come_from_all_over_the_data() -> None:
    first = prepared("first", [([n, 1], [False, True]) for n in range(150)])
    often = prepared("often", [([n, 2], [False, True]) for n in range(50)], weight=3.0)
    long = prepared("long", [([7] * 900, [False] + [True] * 899)])
    data = PreparedData(train=(first, often, long), eval=(DATA.train[0],))
    found = data.calibration_samples()
    kinds = [text[1] for text in found]
    assert {kind: kinds.count(kind) for kind in (1, 2, 7)} == {1: 32, 2: 32, 7: 1}
    assert found[:3] == [[0, 1], [4, 1], [9, 1]]
    assert found[31] == [145, 1]
    assert found[-1] == [7] * 512  # its beginning
    assert data.calibration_samples() == found
    assert PreparedData(train=(), eval=()).calibration_samples() == []
