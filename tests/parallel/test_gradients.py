"""Gradients that meet in messages of a limited size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardtune.core.world import World
from shardtune.measure.collective_counter import CollectiveCounter
from shardtune.parallel.gradients import add_up
from tests.ranks import on_ranks

SHAPES = ((100,), (10, 20), (300,), (5, 20))


def met(world: World, message: int) -> tuple[list[Any], int]:
    gradients = [torch.full(shape, float(10 * n + world.rank)) for n, shape in enumerate(SHAPES)]
    gradients[1] = gradients[1].T  # not as it lies in memory
    with CollectiveCounter() as probe:
        add_up(gradients, None, over=2, message=message)
    return [gradient.unique().tolist() for gradient in gradients], probe.messages["all_reduce"]


@pytest.mark.parametrize(
    ("message", "count"),
    [(1, 4), (300, 3), (10_000, 1)],  # 100 + 200, 300, 100 numbers in messages of 300
)
def test_sums_are_the_same_in_messages_of_any_size(message: int, count: int) -> None:
    for sums, messages in on_ranks(2, met, message):
        assert sums == [[0.5], [10.5], [20.5], [30.5]]  # (10n + 10n + 1) / 2
        assert messages == count
