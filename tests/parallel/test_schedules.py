"""The formula for the V-shaped schedule against torch's own order, played in unit times."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleZBVZeroBubble

from shardtune.core.pipeline_schedule import Pipelining


def played(ranks: int, microbatches: int) -> float:
    """The bubble if forward pass, gradients of inputs and gradients of weights take one unit each.

    Gradients of inputs and weights together, where torch joins them, take two.
    """
    order: Any = object.__new__(ScheduleZBVZeroBubble)
    order.pp_group_size, order._n_microbatches, order.num_stages = ranks, microbatches, 2 * ranks
    waiting = {}
    for rank in range(ranks):
        order.rank = rank
        waiting[rank] = [a for a in order._calculate_single_rank_operations(rank) if a is not None]
    done: dict[tuple[int, str, int], float] = {}
    clocks = [0.0] * ranks
    while any(waiting.values()):
        for rank, actions in waiting.items():
            if not actions:
                continue
            stage, number = actions[0].stage_index, actions[0].microbatch_index
            kind = actions[0].computation_type.value
            before, behind = [(stage - 1, "F", number)], [(stage + 1, "I", number)]
            if kind == "F":
                needs = before if stage else []
            elif kind == "W":
                needs = [(stage, "I", number)]
            else:
                needs = [(stage, "F", number), *(behind if stage < 2 * ranks - 1 else [])]
            if all(need in done for need in needs):
                actions.pop(0)
                clocks[rank] = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] += 2 if kind == "B" else 1
                done[stage, "I" if kind == "B" else kind, number] = clocks[rank]
    return max(clocks) / (6 * microbatches) - 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16)])
def test_the_zero_bubble_is_as_small_as_the_formula_says(ranks: int, microbatches: int) -> None:
    formula = Pipelining("zero_bubble", 2).bubble(ranks, microbatches)
    assert played(ranks, microbatches) == pytest.approx(formula)
