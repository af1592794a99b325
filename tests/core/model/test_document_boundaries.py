"""Boundaries of documents, from positions that start again."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtune.core.model.document_boundaries import FEWEST, VARLEN, attention_inputs, document_ends


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    """Rows of documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def test_boundaries_are_counted_over_all_rows():
    ends = document_ends(positions_of([[3, 2], [1, 1, 3]]))
    assert ends.dtype == torch.int32
    assert ends[:6].tolist() == [0, 3, 5, 6, 7, 10]  # by hand
    assert ends[6:].eq(10).all()
    assert len(ends) == FEWEST + 1


def test_rows_of_one_document_need_no_boundaries():
    assert document_ends(positions_of([[5], [5]])) is None


def test_padding_that_counts_on_belongs_to_the_last_document():
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])  # the last two are padding
    assert document_ends(positions)[:3].tolist() == [0, 2, 6]


def test_a_row_that_begins_elsewhere_still_begins():
    positions = torch.tensor([[0, 1, 2], [3, 4, 0]])  # row two would go on where row one stops
    assert document_ends(positions)[:4].tolist() == [0, 3, 5, 6]


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=30), min_size=1, max_size=4))
def test_lists_of_few_sizes_hold_every_document(rows: list[list[int]]):
    width = max(map(sum, rows))
    filled = [[*row, width - sum(row)] if sum(row) < width else row for row in rows]
    ends = document_ends(positions_of(filled))
    lengths = [length for row in filled for length in row]
    if len(lengths) == len(filled):
        assert ends is None
        return
    found = ends.diff()
    assert found[: len(lengths)].tolist() == lengths
    assert found[len(lengths) :].eq(0).all()
    size = len(found)
    assert size >= FEWEST
    assert size & (size - 1) == 0


def test_only_our_attention_is_told():
    positions = positions_of([[2, 2]])
    other = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    ours = SimpleNamespace(config=SimpleNamespace(_attn_implementation=VARLEN))
    assert attention_inputs(other, positions, "cpu") == {}
    assert attention_inputs(torch.nn.Linear(1, 1), positions, "cpu") == {}
    told = attention_inputs(ours, positions, "cpu")
    assert told["attention_mask"].shape == (1, 1, 1, 1)
    assert told["max_length_q"] == 4
    assert told["cu_seq_lens_q"][:3].tolist() == [0, 2, 4]
