"""Stages, borders and waiting, as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtune.core.pipeline_schedule import Pipelining, split_layers, stage_costs


def test_the_head_counts_as_the_layers_that_it_costs() -> None:
    """Llama-3.2-1B: a layer has 60.8 million weights in matrices, the head 262.7 million."""
    costs = stage_costs([60.8] * 16, 262.7)
    sizes = [len(stage) for stage in split_layers(costs, 4)]
    assert sizes == [5, 5, 5, 1]  # four each would make the last stage twice as slow as the others


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_a_cut_has_every_part_once_and_no_better_one_exists(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    found = split_layers(costs, stages)
    assert [part for stage in found for part in stage] == list(range(len(costs)))
    assert all(found)
    worst = max(sum(costs[part] for part in stage) for stage in found)
    assert worst == _cheapest(tuple(costs), stages)


def _cheapest(costs: tuple[int, ...], stages: int) -> int:
    """By trying every cut."""
    if stages == 1:
        return sum(costs)
    first = range(1, len(costs) - stages + 2)
    return min(max(sum(costs[:n]), _cheapest(costs[n:], stages - 1)) for n in first)


def test_more_stages_than_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 parts can't make 3 stages"):
        split_layers([1, 1], 3)


def test_who_has_which_stage() -> None:
    assert Pipelining("1f1b").ranks(3) == (0, 1, 2)
    assert Pipelining("interleaved", 2).ranks(2) == (0, 1, 0, 1)
    assert Pipelining("zero_bubble", 2).ranks(3) == (0, 1, 2, 2, 1, 0)


def test_borders_over_which_a_rank_sends() -> None:
    """Activations on and gradients back; what stays on a rank isn't sent."""
    assert [Pipelining("gpipe").borders(4, rank) for rank in range(4)] == [1, 2, 2, 1]
    assert [Pipelining("interleaved", 2).borders(2, rank) for rank in (0, 1)] == [3, 3]
    assert [Pipelining("zero_bubble", 2).borders(2, rank) for rank in (0, 1)] == [2, 2]


def test_bubbles() -> None:
    """Narayanan et al. 2021, section 2.2: (p - 1) / m, divided by the chunks."""
    assert Pipelining("1f1b").bubble(4, 8) == 3 / 8
    assert Pipelining("interleaved", 2).bubble(4, 8) == 3 / 16
    assert Pipelining("layers").utilisation(4, 8) == 1 / 4
    assert Pipelining("gpipe").utilisation(2, 4) == 0.8
